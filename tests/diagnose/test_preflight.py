"""The checks of a preflight on findings made by hand, and its report."""

import dataclasses
import io
import json
import math

import pytest
import torch
import yaml
from rich.console import Console

from fp8rl.diagnose.measure import difference
from fp8rl.diagnose.preflight import Agreed, preflight, reported, same_spec
from fp8rl.diagnose.preflight.same_logprobs import NATIVE_LIMIT, noise_floor, trainer_against_engine
from fp8rl.diagnose.preflight.same_spec import judged
from fp8rl.diagnose.report import Difference, Finding, Report
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment import Experiment, load_experiment, parse_experiment
from fp8rl.rl.run.engines.serving import expected_report
from tests.support.commands import result_of
from tests.support.definitions import SIZES, shape_of
from tests.support.preconditions import edit_config, write_lines
from tests.support.tiny_model import TinyModel, write_tiny_model

MODEL = dataclasses.replace(SIZES, ffn_size=0, experts=8)
DENSE = dataclasses.replace(MODEL, experts=0, top_k=0, expert_size=0, ffn_size=128)
EXACT = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
NATIVE = dataclasses.replace(EXACT, mode="native")


def spec(**sections: dict) -> Experiment:
    return parse_experiment(
        {"model": {"path": "model"}, "data": {"train": "train.jsonl", "eval": "eval.jsonl"}, **sections}
    )


def made(mean: float | None, **changes: float | None) -> Difference:
    return dataclasses.replace(
        Difference(tokens=100, nonfinite=0, mean=mean, p99=mean, max=mean, exact_frac=float(mean == 0)), **changes
    )


def passed(check: Finding) -> bool:
    return check.grade == "ok"


BF16 = {"numerics": {"preset": "bf16", "trainer": "bf16", "rollout": "bf16"}}


def test_aligned_blocks_pass_and_bf16_needs_none() -> None:
    check = same_spec.block_alignment(shape_of(MODEL), spec(trainer={"tp": 2}))
    assert check.grade == "ok"
    assert all(part in check.found for part in ("hidden_size 256", "head_dim 128", "moe_intermediate_size 128", "tp 2"))
    assert same_spec.block_alignment(shape_of(dataclasses.replace(MODEL, head_dim=64)), spec(**BF16)).grade == "ok"


@pytest.mark.parametrize(
    ("model", "sections", "name"),
    [(dataclasses.replace(MODEL, head_dim=64), {}, "head_dim"),
     (dataclasses.replace(DENSE, ffn_size=384), {"trainer": {"tp": 2}}, "intermediate_size / trainer.tp = 384 / 2"),
     (MODEL, {"trainer": {"tp": 4}}, "num_key_value_heads")],
)  # fmt: skip
def test_blocks_that_straddle_are_found_before_anything_starts(model, sections: dict, name: str) -> None:
    check = same_spec.block_alignment(shape_of(model), spec(**sections))
    assert check.grade == "error" and check.remedy and name in check.found + check.expected


@pytest.mark.parametrize(
    ("shape", "config", "arguments", "said"),
    [(TinyModel(hidden=192, heads=4, kv_heads=2), {}, [], "block alignment"),
     (TinyModel(heads=4, kv_heads=2), {"num_hidden_layers": 3}, [], "model.layers.2.input_layernorm.weight: found"),
     (TinyModel(heads=4, kv_heads=2), {}, ["algorithm.name=sft"], "expected a run with an engine")],
    ids=["misaligned", "of another architecture", "without an engine"],
)  # fmt: skip
def test_nothing_is_started_for_what_cannot_agree(shape, config, arguments, said, tmp_path, monkeypatch) -> None:
    monkeypatch.delattr("fp8rl.diagnose.preflight.open_pair")
    write_tiny_model(tmp_path / "model", shape)
    edit_config(tmp_path / "model", **config)
    write_lines(tmp_path / "train.jsonl", [("1+4=?", "#### 5")])
    sections = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}, "eval": {"problems": 0}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(sections))
    result = result_of("preflight", tmp_path / "spec.yaml", "--json", *arguments)
    assert result.exit_code == (1 if said == "block alignment" else 2) and said in result.output
    if result.exit_code == 1:
        aligned, precision = Report.from_json(result.stdout).findings
        assert "192" in aligned.found and "multiple of 128" in aligned.expected
        assert [(each.key, each.grade) for each in (aligned, precision)] == [
            ("same bytes, block alignment", "error"), ("same spec, precision of both sides", "ok")
        ]  # fmt: skip


def test_both_sides_run_one_precision() -> None:
    for trainer, rollout, ok in (("fp8_forward", "fp8", True), ("bf16", "bf16", True), ("bf16", "fp8", False)):
        check = same_spec.same_precision(spec(numerics={"trainer": trainer, "rollout": rollout}))
        assert (check.grade == "ok") is ok and (ok or "numerics.trainer=fp8 numerics.rollout=fp8" in check.remedy)


def test_modules_quantized_on_one_side_only_are_named() -> None:
    assert passed(same_spec.quantized_modules(["b", "a"], ["a", "b"]))
    check = same_spec.quantized_modules(["a", "c"], ["a", "d", "e"])
    assert check.grade == "error" and check.found == "only in the trainer: c; only in the engine: d, e"


@pytest.mark.parametrize("preset", ["fp8_block_pow2", "fp8_block_fp32"])
def test_scales_of_the_quantizer_are_what_the_spec_says(preset: str) -> None:
    weight = QuantSpec.preset(preset).weight
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    named = [("w_scale_inv", quantize(x, weight).scale_inv)]
    check = same_spec.scale_formats(named, ["w_scale_inv"], weight.scale)
    assert check.grade == "ok" and "6 scales in 1 tensors" in check.found
    # FP32 scales of random weights are no powers of two; powers of two are good FP32 scales.
    assert passed(same_spec.scale_formats(named, ["w_scale_inv"], "pow2")) is (preset == "fp8_block_pow2")
    assert passed(same_spec.scale_formats(named, ["w_scale_inv"], "fp32"))


@pytest.mark.parametrize(
    "scale", [torch.tensor([0.5, 3.0]), torch.tensor([math.inf]), torch.tensor([0.0]), torch.tensor([0.5]).bfloat16()]
)
def test_a_scale_of_another_format_is_named(scale: torch.Tensor) -> None:
    good = torch.tensor([2.0**-20, 1.0, 64.0])
    check = same_spec.scale_formats([("a_scale_inv", good), ("b_scale_inv", scale)], ["a_scale_inv"], "pow2")
    assert check.grade == "error" and "1 of 2" in check.found and "b_scale_inv" in check.found
    check = same_spec.scale_formats([], ["a_scale_inv"], "pow2")
    assert check.grade == "error" and "a_scale_inv (not the one that was quantized)" in check.found


def test_an_engine_that_reports_something_else_is_told() -> None:
    expected = expected_report(EXACT)
    assert passed(same_spec.handshake(EXACT, None, expected))
    changed = expected.model_copy(update={"spec_digest": "0" * 16, "hooks": expected.hooks[1:]})
    check = same_spec.handshake(EXACT, None, changed)
    assert check.grade == "error" and "spec_digest" in check.found and expected.hooks[0] in check.found


def test_the_kv_cache_is_in_the_format_of_the_spec() -> None:
    for numerics, expected in ((EXACT, "bfloat16"), (dataclasses.replace(EXACT, kv="fp8"), "float8_e4m3fn")):
        for kind in ("bfloat16", "float8_e4m3fn", "float16"):
            report = expected_report(numerics).model_copy(update={"kv_cache_dtype": kind})
            assert passed(same_spec.kv_cache_dtype(numerics, report)) is (kind == expected)


def test_a_difference_is_over_the_masked_tokens() -> None:
    first = torch.tensor([[0.0, -1.0, -2.0, -9.0], [0.0, -1.5, math.nan, -7.0]])
    second = torch.tensor([[0.0, -1.0, -2.5, -1.0], [0.0, -1.25, -1.0, -1.0]])
    mask = torch.tensor([[False, True, True, False], [False, True, True, False]])
    d = difference(first, second, mask)
    assert (d.tokens, d.nonfinite, d.max) == (3, 1, 0.5)
    assert d.mean == pytest.approx(0.25) and d.exact_frac == pytest.approx(1 / 3) and not d.zero
    assert difference(first, first, mask & ~first.isnan()).zero


def test_exact_mode_asks_for_zero_and_nothing_less() -> None:
    assert passed(trainer_against_engine(EXACT, made(0.0), None))
    assert not passed(trainer_against_engine(EXACT, made(1e-9), made(1.0)))
    assert not passed(trainer_against_engine(EXACT, made(0.0, nonfinite=1), None))
    nothing = made(None, tokens=0, exact_frac=None)
    assert not passed(trainer_against_engine(EXACT, nothing, None))
    assert "fp8rl explain" in trainer_against_engine(EXACT, made(1e-9), None).remedy
    mixed = dataclasses.replace(EXACT, trainer="bf16")
    assert "numerics.trainer=fp8" in trainer_against_engine(mixed, made(1e-3), None).remedy


def test_native_mode_is_bound_by_the_bf16_floor() -> None:
    floor = made(0.01)
    assert passed(trainer_against_engine(NATIVE, made(0.01 * NATIVE_LIMIT * 0.99), floor))
    assert not passed(trainer_against_engine(NATIVE, made(0.01 * NATIVE_LIMIT * 1.01), floor))
    assert passed(trainer_against_engine(NATIVE, made(9.0), None))  # nothing to measure it by
    assert not passed(trainer_against_engine(NATIVE, made(0.0, nonfinite=1), floor))


def test_a_floor_fails_in_exact_mode_alone() -> None:
    floors = {"alone against together": made(1e-6)}
    assert [passed(check) for mode in ("exact", "native") for check in noise_floor(mode, floors)] == [False, True]


def test_a_report_survives_its_json_and_shows_what_a_failed_check_expected() -> None:
    checks = [judged("spec", "one", True, "found 1", "no 1"), judged("bytes", "two", False, "a", "b", "Do c.")]
    differences = {"trainer against engine": made(0.0), "nothing": made(None, exact_frac=None)}
    agreed = Agreed("d", "exact", "fp8", "fp8", checks, {"trainer": ["a"], "engine": ["a"]}, differences)
    found = reported(agreed, "a spec", 1.5)
    read, values = Report.from_json(found.to_json()), json.loads(found.to_json())
    assert read.findings == tuple(checks) and read.to_json() == found.to_json() and not found.ok
    assert (values["schema"], values["command"], values["subject"]) == (2, "preflight", "a spec")
    assert values["facts"]["differences"]["trainer against engine"]["max"] == 0.0
    with pytest.raises(ValueError, match="schema: found 1, expected 2"):
        Report.from_json(json.dumps(values | {"schema": 1}))
    console = Console(width=100, file=io.StringIO())
    console.print(found)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "ok     same spec, one: found 1" in text and "no 1" not in text
    assert "error  same bytes, two: found a, expected b. Do c." in text
    assert "same spec holds, same bytes does not hold, same logprobs was not reached" in text


def test_zero_is_written_as_zero_and_nothing_else_is() -> None:
    assert str(made(0.0)) == "|d| mean 0, p99 0, max 0, exact 1 on 100 tokens" and "mean 1.00e-09" in str(made(1e-9))


def test_native_mode_is_not_judged_without_its_floor() -> None:
    with pytest.raises(UserError, match="--quick: found 'numerics.mode=native', expected exact"):
        preflight(load_experiment("examples/arithmetic_native.yaml"), quick=True)
