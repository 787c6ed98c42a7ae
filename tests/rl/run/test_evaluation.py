"""When and on what a run is evaluated; real evaluations are in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from rl.run.evaluation import held_out_prompts, is_due
from tests.support.experiments import experiment
from tests.support.paths import EXAMPLES


def test_held_out_prompts_are_as_many_as_asked(tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"eval {n}", "answer": "#### 1"}) + "\n" for n in range(4)]
    (tmp_path / "eval").write_text("".join(lines))
    data = {"train": "unread", "eval": str(tmp_path / "eval")}
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe")
    two = held_out_prompts(experiment(data=data, eval={"problems": 2}), tokenizer)
    assert [prompt.problem.question for prompt in two] == ["eval 0", "eval 1"]
    assert tokenizer.decode(two[1].token_ids) == "<|user|>eval 1<|assistant|>"
    assert held_out_prompts(experiment(data=data, eval={"problems": 0}), tokenizer) == []


def test_it_is_due_at_intervals_and_at_the_end() -> None:
    def steps(every: int, problems: int = 5) -> list[int]:
        settings = experiment(run={"steps": 7}, eval={"every": every, "problems": problems})
        return [step for step in range(1, 8) if is_due(settings, step)]

    assert steps(3) == [3, 6, 7] and steps(0) == [7] and steps(3, problems=0) == []
