"""Certifying a dump: each side is judged by the model itself, and what is planted in one is found and named."""

import json
import math
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GraniteConfig, GraniteForCausalLM

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.record.history import Event, append_entry
from fp8rl.rl.record.rollouts import RolloutRecord, write_rollouts
from fp8rl.trainer.checkpoint.files import About, write_about
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl_certify import dump as certifying
from fp8rl_certify.dump import certify_dump
from fp8rl_certify.dump.dump_report import DumpReport
from fp8rl_certify.dump.reading import read_dump
from fp8rl_certify.dump.reference import Reference
from fp8rl_certify.dump.rows import Sampling
from tests.support.batches import random_batch
from tests.support.commands import invoke, result_of
from tests.support.paths import EXAMPLES
from tests.support.ranks import in_a_fork
from tests.support.scored_batches import CapsuleRun

EOS, VOCABULARY = 2, 128
ROWS, PROMPT, ANSWER = 12, 6, 20
Tokens = list[list[int]]
Certified = Callable[..., DumpReport]
run = partial(invoke, "certify")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Granite, which is none of our architectures: transformers alone scores it."""
    path = tmp_path_factory.mktemp("granite")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    own = {"max_position_embeddings": 64, "initializer_range": 0.3, "attention_multiplier": 32**-0.5}
    config = GraniteConfig(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=EOS, **sizes, **own)
    GraniteForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@torch.no_grad()
def said(path: Path, tokens: Tokens, temperature: float = 1.0, dtype: torch.dtype = torch.bfloat16):
    """float64 [B, S - 1], of each token but the first: an honest engine's, of one batch."""
    logits = GraniteForCausalLM.from_pretrained(path, dtype=dtype)(torch.tensor(tokens)).logits[:, :-1]
    logprobs = (logits.double() / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens)[:, 1:, None]).squeeze(-1)


@pytest.fixture(scope="module")
def tokens(model: Path) -> Tokens:
    """Sampled at temperature 1, EOS among them, which answers go on behind."""
    config = GraniteForCausalLM.from_pretrained(model, dtype=torch.float32)
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT), generator=drawn)
    with torch.no_grad():
        for _ in range(ANSWER):
            probabilities = config(ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=drawn)], 1)
    ids[:, -1] = EOS
    return ids.tolist()


def rows(tokens: Tokens, logprobs, **more: Any) -> list[dict[str, Any]]:
    """Rows of our schema. logprobs: of each token but the first."""
    answers = logprobs[:, PROMPT - 1 :].tolist()
    return [{"tokens": t, "prompt_length": PROMPT, "logprobs": x, **more} for t, x in zip(tokens, answers, strict=True)]


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in found))
    return path


@pytest.fixture
def certified(tmp_path: Path, model: Path) -> Certified:
    def certify(found: list[dict[str, Any]], **options: Any) -> DumpReport:
        return certify_dump(write(tmp_path / "dump.jsonl", found), model, **options)

    return certify


def test_an_honest_engine_in_bf16_is_within_the_floor(certified: Certified, model: Path, tokens: Tokens) -> None:
    report = certified(rows(tokens, said(model, tokens)))
    (engine,) = report.sides
    assert (report.verdict, report.ok, engine.explanations) == ("within the floor", True, [])
    full = said(model, tokens, dtype=torch.float32)
    expected = (said(model, tokens) - full)[:, PROMPT - 1 :].abs().mean().item()
    assert engine.reference.mean == pytest.approx(expected, rel=1e-6) and expected > 1e-3
    assert report.floor.mean == pytest.approx(expected, rel=0.2), "BF16, one row at a time"
    assert (report.tokens, report.rows, report.ours) == (ROWS * ANSWER, ROWS, {})
    assert "GraniteForCausalLM" in report.why_not_ours and any("GraniteForCausalLM" in note for note in report.notes)
    by_place = [part for part in report.parts if part.by == "place in the answer"]
    assert [(part.label, part.tokens // ROWS) for part in by_place] == [("0–7", 8), ("8–15", 8), ("16–31", 4)]
    mean = sum(part.tokens * (part.means["the engine"] or 0) for part in by_place) / report.tokens
    assert mean == pytest.approx(expected, rel=1e-6), "the parts are the whole"


def test_the_side_that_is_wrong_is_named(certified: Certified, model: Path, tokens: Tokens) -> None:
    """An engine in BF16, and a trainer that forgot the temperature of 0.7."""
    right, wrong = said(model, tokens, 0.7), said(model, tokens, 1.0)
    found = rows(tokens, right, temperature=0.7)
    for row, theirs in zip(found, wrong[:, PROMPT - 1 :].tolist(), strict=True):
        row["trainer_logprobs"] = theirs
    report = certified(found)
    assert [side.verdict for side in report.sides] == ["within the floor", "broken"]
    first = report.sides[1].explanations[0]
    assert first.name == "temperature" and "of temperature 1, not of 0.7" in first.text
    assert report.between is not None and report.between.mean == pytest.approx(first.before, rel=0.2)
    assert DumpReport.from_json(report.to_json()) == report


def test_noise_on_a_model_that_is_sure_of_its_tokens_is_not_taken_for_other_weights() -> None:
    """Its log-probabilities lie together, but for a few, so that little noise mixes their ranks."""
    draw = torch.Generator().manual_seed(0)
    sure = -torch.rand(400, generator=draw, dtype=torch.float64) * 1e-3
    sure[::20] = -3.0
    noisy = (sure - 0.05 * torch.rand(400, generator=draw, dtype=torch.float64)).clamp(max=0.0)
    other = -torch.rand(400, generator=draw, dtype=torch.float64) * 3
    assert not certifying._is_unrelated(sure, noisy) and certifying._is_unrelated(sure, other)


def test_a_part_of_a_long_dump_is_scored_and_rounding_noticed(certified, model, tokens) -> None:
    rounded = said(model, tokens).bfloat16().double()
    report = certified(rows(tokens, rounded, reward=1.0), budget=3 * (PROMPT + ANSWER))
    assert (report.rows, report.of_rows, report.tokens) == (3, ROWS, 3 * ANSWER)
    assert sorted(row.place for row in report.worst) == ["line 1", "line 5", "line 9"]
    assert any("rounded to bfloat16" in note for note in report.notes) and report.unread == ["reward"]


@pytest.mark.slow
def test_dumps_of_slime_are_read(model: Path, tokens: Tokens, tmp_path: Path) -> None:
    """What `Sample.to_dict` of slime gives (slime/utils/types.py), and what its trainer writes."""
    logprobs = said(model, tokens)[:, PROMPT - 1 :]
    common = {"response_length": ANSWER, "loss_mask": [1] * (ANSWER - 1) + [0], "weight_versions": ["3"]}
    common |= {"prompt": "1 + 1", "reward": 1.0, "metadata": {}, "train_metadata": None}
    samples = [
        common | {"tokens": row, "rollout_log_probs": values, "rollout_routed_experts": np.zeros((len(row) - 1, 2, 2))}
        for row, values in zip(tokens, logprobs.tolist(), strict=True)
    ]
    aborted = {**samples[0], "status": "aborted", "rollout_log_probs": None}
    torch.save({"rollout_id": 7, "samples": [aborted, *samples]}, tmp_path / "rollout_7.pt")
    report = certify_dump(tmp_path / "rollout_7.pt", model)
    assert report.verdict == "within the floor" and report.tokens == ROWS * (ANSWER - 1)
    columns = {
        "tokens": [torch.tensor(row) for row in tokens], "response_lengths": [ANSWER] * ROWS,
        "total_lengths": [PROMPT + ANSWER] * ROWS, "loss_masks": [torch.ones(ANSWER, dtype=torch.int32)] * ROWS,
        "rollout_log_probs": [*logprobs.float()], "log_probs": [*said(model, tokens, 1.4)[:, PROMPT - 1 :].float()],
        "raw_reward": [1.0] * (ROWS + 2),
    }  # fmt: skip
    torch.save({"rollout_id": 7, "rank": 0, "rollout_data": columns}, tmp_path / "train_7_0.pt")
    verdicts = [side.verdict for side in certify_dump(tmp_path / "train_7_0.pt", model).sides]
    assert verdicts == ["within the floor", "broken"], "both sides are in the file of the trainer"


def test_a_checkpoint_in_fp8_is_multiplied_out(tmp_path: Path) -> None:
    """Codes times scales, by torch; transformers has no kernels for them on a CPU."""
    small = EXAMPLES / "models/tiny_qwen3_moe"
    code, printed = invoke("convert", small, tmp_path / "fp8")
    assert code == 0, printed
    stored = load_file(tmp_path / "fp8/model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    codes, scales = stored[name], stored[name + "_scale_inv"]
    expected = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, : codes.shape[1]]
    reference = Reference(tmp_path / "fp8", torch.float32)
    assert torch.equal(reference.model.state_dict()[name], expected)
    assert not torch.equal(expected, load_file(small / "model.safetensors")[name].float())
    ids = list(range(3, 20))
    apart = (reference.logits(ids) - Reference(small, torch.float32).logits(ids)).abs().max().item()
    assert 1e-3 < apart < 2.0, "all other weights are where they belong"


@pytest.mark.slow
def test_batches_of_verl_are_read(model: Path, tokens: Tokens, tmp_path: Path) -> None:
    """Tensors of a DataProto: prompts padded on the left to 8, answers on the right to 24."""
    ids = torch.nn.functional.pad(torch.tensor(tokens), (2, 4))
    mask = torch.nn.functional.pad(torch.ones(ROWS, PROMPT + ANSWER, dtype=torch.int64), (2, 4))
    by_token = torch.nn.functional.pad(said(model, tokens, 0.8)[:, PROMPT - 1 :].float(), (0, 4))
    batch = {"prompts": ids[:, :8].contiguous(), "responses": ids[:, 8:].contiguous(), "input_ids": ids}
    batch |= {"attention_mask": mask, "position_ids": mask.cumsum(1) - 1, "response_mask": mask[:, 8:].clone()}
    batch |= {"rollout_log_probs": by_token, "old_log_probs": by_token.clone()}
    batch["response_mask"][:, 3:5] = 0  # a tool's words
    save_file(batch, tmp_path / "step_1.safetensors", {"temperature": "0.8"})
    report = certify_dump(tmp_path / "step_1.safetensors", model)
    assert [side.verdict for side in report.sides] == ["within the floor"] * 2 and report.temperatures == [0.8]
    assert report.tokens == ROWS * (ANSWER - 2) and report.between is not None and report.between.zero
    np.savez(tmp_path / "step_1.npz", **{name: tensor.numpy() for name, tensor in batch.items()})
    (first, _) = certify_dump(tmp_path / "step_1.npz", model).sides
    assert "of temperature 0.8, not of 1" in first.explanations[0].text, "an npz has no place for the temperature"
    torch.save(batch, tmp_path / "step_1.pt")
    assert certify_dump(tmp_path / "step_1.pt", model, sampling=lambda _: Sampling(0.8)).ok


@pytest.mark.slow
def test_rows_in_parquet_are_read(model: Path, tokens: Tokens, tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(rows(tokens, said(model, tokens), version=2))
    pyarrow.parquet.write_table(table, tmp_path / "dump.parquet")
    report = certify_dump(tmp_path / "dump.parquet", model)
    assert report.ok and report.tokens == ROWS * ANSWER and report.worst[0].place.startswith("row ")


def _certified_as_json(path: Path, model: Path) -> str:
    return certify_dump(path, model).to_json()


@pytest.mark.slow
def test_exact_log_probabilities_are_equal_to_ours_bit_for_bit(layout, tmp_path: Path) -> None:
    """Scored by a trainer, in FP8 and in one batch; certified in a process of its own."""
    from fp8rl.trainer.trainer import Trainer

    model, batch = EXAMPLES / "models/tiny_qwen3_moe", random_batch(rows=6, longest=40)
    numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
    trainer = Trainer(TrainerSpec(model, TrainerSection(), numerics, 0, 1, 64), layout)
    order, logprobs = trainer.score(batch)
    found = []
    for row, values in zip(order, logprobs, strict=True):
        length = int(batch.lengths[row])
        if length < 4:
            continue
        ids = batch.tokens[row, :length].tolist()
        found.append({"tokens": ids, "prompt_length": 3, "logprobs": values[3:length].tolist()})
    report = DumpReport.from_json(
        in_a_fork(tmp_path, partial(_certified_as_json, write(tmp_path / "dump.jsonl", found), model))
    )
    assert report.verdict == "equal" and report.sides[0].ours["ours, FP8 (fp8_block_pow2)"].zero
    plain = report.sides[0].ours["ours, BF16"]
    assert plain.mean is not None and plain.mean > 1e-4, "and BF16 is another computation"


RECORD = RolloutRecord("1+1=?", "2", 1.0, 0.0, 0, 7, True, [5, 6], [7, 8, 9], [-0.5, -0.25], [-0.5, -0.5], [3, 3], 1.0)


def test_a_run_without_the_weights_of_a_step_takes_those_that_are_given(model: Path, tmp_path: Path) -> None:
    made = CapsuleRun.make(tmp_path).files
    made.rollouts(4).parent.mkdir()
    record = replace(RECORD, told=[(1, 2)])
    write_rollouts(made.rollouts(4), [record, replace(record, weight_versions=[3, 2])])
    code, printed = run(made.path)
    assert code == 2 and "found 'answers of weight version 3, and checkpoints of versions none'" in printed
    dump = read_dump(made.path, model)
    assert (dump.kind, dump.model, dump.numerics is not None) == ("step 4 of the run run", model, True)
    assert [(row.tokens, row.sampled) for row in dump.rows] == [([5, 6, 7, 8, 9], [0, 2]), ([5, 6, 7, 8, 9], [0])]
    assert [dump.rows[0].trainer_logprobs, dump.rows[0].version] == [[-0.5, None, -0.5], 3]
    for step, precision in ((4, "fp8"), (3, "bf16")):  # a gate fired after the step was sampled, and before
        append_entry(made.events, Event(step, "mismatch/k3_kl", 1.0, "above 0", "bf16_both", None, "bf16_both: ..."))
        assert (computed := read_dump(made.path, model).numerics) and computed.rollout == precision


def test_the_weights_of_a_step_are_found_by_their_version_not_by_the_number_of_a_step(tmp_path: Path) -> None:
    """With two updates of a batch, the checkpoint of step 2 has version 4, and that of step 4 version 8."""
    made = CapsuleRun.make(tmp_path).files
    for step in (2, 4):
        made.checkpoint(step).mkdir(parents=True)
        write_about(made.checkpoint(step), About(2 * step, {}, {}))
    made.rollouts(3).parent.mkdir()
    record = replace(RECORD, token_ids=[7, 8], weight_versions=[4, 4])
    write_rollouts(made.rollouts(3), [record])
    assert read_dump(made.path).checkpoint == made.checkpoint(2)
    write_rollouts(made.rollouts(3), [replace(record, weight_versions=[2, 2])])
    code, printed = run(made.path)
    assert code == 2 and "found 'answers of weight version 2, and checkpoints of versions 4, 8'" in printed


GOOD = {"tokens": [3, 4, 5, 6], "prompt_length": 2, "logprobs": [-1.0, -2.0]}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"logprobs": None}, "line 2 of PATH: logprobs: found 'a row with prompt_length, tokens', expected logpr"),
     ({"logprobs": [-1.0]}, "logprobs: found '1 values', expected 2, one for each of 4 - 2 tokens of the answer"),
     ({"logprobs": [-1.0, math.nan]}, "logprobs[1]: found nan, expected a finite number, or a 0 in its place"),
     ({"logprobs": [0.4, 0.3]}, "logprobs[0]: found 0.4, expected a logarithm of a probability, at most 0"),
     ({"tokens": [3, 4, 5, 500]}, "line 2: tokens[3]: found 500, expected ids below 128, the vocabulary of"),
     ({"prompt_length": 4}, "prompt_length: found 4, expected less than the 4 tokens"),
     ({"top_k": 10**30}, "top_k: found 1000000000000000000000000000000, expected less than or equal to 2147483647"),
     ({"version": "\ud800"}, "line 2 of PATH: found"),
     ({"tokens": [5] * 70, "logprobs": [-1.0] * 68}, "line 2: tokens: found '70 tokens', expected at most 64")],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_one_message(change, message, model, tmp_path) -> None:
    row = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    path = write(tmp_path / "dump.jsonl", [GOOD, row])
    code, printed = run(path, "--model", model)
    assert code == 2 and message.replace("PATH", str(path)) in printed
    assert printed.count("\n") == 1 and "Traceback" not in printed


@dataclass
class Exploit:
    """An object whose pickle makes a folder when it is opened."""

    path: Path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.slow
def test_a_dump_that_cannot_be_read_is_one_message(model: Path, tmp_path: Path) -> None:
    def refusal(name: str, content: bytes | None) -> str:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        code, printed = run(path, "--model", model)
        assert code == 2 and printed.count("\n") == 1 and "Traceback" not in printed, printed
        return printed

    verl = json.dumps({"input": "1 + 1", "output": "2", "gts": "2", "score": 1.0, "step": 1}).encode()
    for name, content, message in (
        ("none.jsonl", None, "expected a file, or the folder of a run"),
        ("empty.jsonl", b"", "with 0 rows', expected at least one answer"),
        ("x.jsonl", b'{"reward": ' + b"9" * 5000 + b"}\n", "a number of 5000 digits"),
        ("x.jsonl", b"hello\n", "line 1 of"), ("1.jsonl", verl, "as verl writes to trainer.rollout_data_dir"),
        ("gen_batch.dp", b"", "a pickle, which may run any code"),
        ("dump", b"\x80\x04\x95", "a pickle, which may run any code"),
        ("x.safetensors", b"abc", "expected a whole safetensors file"),
        ("x.parquet", b"abc", "expected a parquet file"),
        ("x.pt", b"abc", "expected numbers, texts, lists, dictionaries and tensors"),
    ):  # fmt: skip
        assert message in refusal(name, content)
    np.savez(tmp_path / "whole.npz", input_ids=np.ones((3, 400), dtype=np.int64))
    whole = (tmp_path / "whole.npz").read_bytes()
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 0xFF
    for content in (b"abc", whole[:-1], bytes(broken)):
        assert "expected a whole file" in refusal("x.npz", content)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d,)}\n" % 10**40
        archive.writestr("input_ids.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    assert "expected a whole file" in refusal("x.npz", None)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        archive.writestr("input_ids.npy", b"")
        archive.filelist[0].file_size = 65 << 26  # what the directory of a bomb says
    assert "bytes when it is unpacked', expected at most" in refusal("bomb.npz", None)
    sample = {"tokens": [3, 4, 5, 6], "response_length": 2, "rollout_log_probs": [-1.0, -2.0]}
    tensors = {name: torch.ones(2, 3) for name in ("input_ids", "attention_mask", "responses", "rollout_log_probs")}
    for value, message in (
        ({"samples": [sample | {"rollout_log_probs": torch.ones(2, dtype=torch.complex64)}]}, "found (1+0j)"),
        ({"samples": [sample | {"response_length": 10**30}]}, "prompt_length: found"),
        (tensors | {"input_ids": [1]}, "expected a whole file"),
        (tensors | {"input_ids": torch.ones(2, 3, device="meta")}, "expected a whole file"),
        ({"samples": [Exploit(tmp_path / "made")]}, "mkdir"),
        ({"weights": torch.zeros(2)}, "with weights', expected slime's samples or rollout_data"),
    ):
        torch.save(value, tmp_path / "x.pt")
        assert message in refusal("x.pt", None)
    assert not (tmp_path / "made").exists(), "nothing of it was run"
    ids = {name: torch.ones(2, 3, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    answers = {"responses": torch.ones(2, 2), "rollout_log_probs": -torch.ones(2, 2)}
    for key, value in (("temperature", "nan"), ("top_k", "inf"), ("min_p", "3")):
        save_file(ids | answers, tmp_path / "x.safetensors", {key: value})
        assert f"{key}: found '{value}', expected" in refusal("x.safetensors", None)
    save_file({"responses": torch.zeros(1, 2)}, tmp_path / "verl.safetensors")
    assert "without attention_mask, input_ids, rollout_log_probs" in refusal("verl.safetensors", None)
    tmp_path.joinpath("folder").mkdir()
    assert "expected a run, with its spec.yaml" in refusal("folder", None)


def test_a_command_without_a_subject_or_a_model_is_one_message(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "dump.jsonl", [GOOD])
    for arguments, message in (
        ([], "DUMP, --server: found 'neither', expected one of them"),
        ([path, "--server", "http://127.0.0.1:1"], "DUMP, --server: found 'both', expected one of them"),
        ([path], "--model: found 'none', expected the Hugging Face directory"),
        ([path, "--model", 5000 * "m"], "--model: found 'mmm"),
        ([path, "--model", tmp_path], "without config.json', expected the Hugging Face directory"),
        ([path, "--model", model, "--page", path / "x.html"], "--page: found"),
    ):
        code, printed = run(*arguments)
        assert code == 2 and message in printed and printed.count("\n") == 1, printed


@pytest.mark.slow
def test_the_command_prints_the_verdict_and_writes_the_page(model: Path, tokens: Tokens, tmp_path: Path) -> None:
    path = write(tmp_path / "dump.jsonl", rows(tokens, said(model, tokens, 0.7)))
    result = result_of("certify", path, "--model", model, "--temperature", "0.7")
    assert result.exit_code == 0 and result.stdout.startswith("the engine: within the floor"), "the verdict comes first"
    assert (tmp_path / "dump.certify.html").is_file()
    page = tmp_path / "other.html"
    code, printed = run(path, "--model", model, "--temperature", "0.8", "--json", "--page", page)
    assert code == 1 and '"verdict": "broken"' in printed
    text = page.read_text()
    assert "the engine: broken: its log-probabilities are those of temperature 0.7, not of 0.8" in text
    assert "floor: the model in BF16 from the model in FP32" in text and "GraniteForCausalLM" in text
    charts = json.loads(text.partition('id="charts">')[2].partition("</script>")[0])
    titles = ["How large differences are", "By place in the answer", "By probability of the token", "By kind of token"]
    assert [chart["title"] for chart in charts] == titles and sum(charts[0]["series"][0]["y"]) == ROWS * ANSWER
