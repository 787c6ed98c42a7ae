"""A step of a live trainer: nothing is found where nothing is planted, and what is planted is found by name."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.diagnose.doctor.formats import differences_of, map_table, rows_of, unseen
from fp8rl.diagnose.doctor.watch import engine_holdings, watch_step
from fp8rl.diagnose.report import plain
from fp8rl.models import read_model
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.formats import Grids, Sighting, stored
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.memory import Holding
from fp8rl.numerics.ops.linear import multiplies_bf16
from fp8rl.numerics.precision_map import CLASSES
from fp8rl.numerics.quantize import fake_quantize
from fp8rl.numerics.spec import QuantSpec, TensorSpec
from fp8rl.rollout.engine.plugin.state import WEIGHTS
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from lab.studies.document.published_map import BACKWARD, OPTIMIZER, answers
from lab.studies.document.published_map import claims as claims_of
from tests.support.batches import cross_entropy, random_batch
from tests.support.commands import shown
from tests.support.models import LENGTH, write_model
from tests.support.tiny_model import TinyModel, write_tiny_model

LIBRARIES = {
    "norm.reduction", "norm.output", "scores.output", "softmax.reduction", "softmax.output", "attention.output",
    *(("head.operands", "head.logits") if multiplies_bf16("cpu") else ()),
}  # fmt: skip
"""Classes that Megatron's and torch's own ops compute in native mode."""
SPEC = QuantSpec.preset("fp8_block_pow2")
FAMILIES, LINEAR = ("glm4_moe", "deepseek_v3"), "qwen3_5_moe_text"


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("watched")
    for family in (*FAMILIES, LINEAR):
        write_tiny_model(folder / family, TinyModel(hidden=256, experts=4, groups=1, family=family))
    return {
        **{family: folder / family for family in (*FAMILIES, LINEAR)},
        "moe": write_model(folder / "moe", experts=4),
        "dense": write_model(folder / "dense", moe=False, tied=True),
    }


@pytest.fixture
def make(paths: dict[str, Path], layout: Any) -> Callable[..., Any]:
    def make(numerics: NumericsConfig, kind: str = "moe", adapter: AdapterSection | None = None) -> Any:
        from fp8rl.trainer.trainer import Trainer

        config = TrainerSection(lr=1e-3, warmup_steps=0, micro_batch_tokens=256)
        return Trainer(TrainerSpec(paths[kind], config, numerics, 0, 10, LENGTH, adapter=adapter), layout)

    return make


def plan(mode: str, **changes: Any) -> NumericsConfig:
    return replace(NumericsConfig(mode=mode, spec=SPEC), **changes)


def watched(trainer: Any, numerics: NumericsConfig, rows: int = 4) -> list[Sighting]:
    batch = random_batch(rows=rows, longest=40)
    return watch_step(trainer, batch, cross_entropy(batch), numerics, trainer.config)


def found(sightings: list[Sighting]) -> dict[str, set[str]]:
    formats: dict[str, set[str]] = {}
    for sighting in sightings:
        formats.setdefault(sighting.key, set()).add(sighting.found)
    return formats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode"), [*((kind, "exact") for kind in ("moe", "dense", *FAMILIES, LINEAR)), (LINEAR, "native")]
)
def test_a_step_is_as_planned_and_every_row_is_seen(kind: str, mode: str, make: Callable[..., Any]) -> None:
    numerics = plan(mode)
    sightings = watched(make(numerics, kind), numerics, rows=8)  # in several micro-batches
    assert differences_of(sightings) == []
    assert set(unseen(rows_of(sightings))) == (LIBRARIES if mode == "native" else set())
    held = {row.key: row.bytes for row in rows_of(sightings)}
    masters = held["master"] + held["gain.master"]
    if kind != LINEAR:  # whose vectors in FP32 are their own masters
        assert held["moment"] == 2 * masters == 2 * held["gradient.buffer"]
    keys = {each.key for each in sightings}
    assert ({"experts.activation", "experts.weight", "experts.gradient", "experts.output"} <= keys) == (kind != "dense")
    assert any(row.key.startswith("router.") for row in rows_of(sightings) if row.trainer) == (kind != "dense")
    formats = found(sightings)
    gates = {"bf16"} if kind == LINEAR and mode == "exact" else set()  # which no spec quantizes
    assert formats["product.activation"] == formats["product.weight"] == formats["product.gradient"] == {"e4m3"} | gates
    if mode == "exact":
        assert formats["scores.output"] == formats["softmax.output"] == {"fp32"}
    assert formats["gradient.buffer"] == formats["gradient.wire"] == {"fp32"}
    assert formats["gain.weight"] == ({"bf16", "fp32"} if kind == LINEAR else {"bf16"})
    claims = {claim.id: claim for claim in claims_of(plain(rows_of(sightings)))}
    if (kind, mode) == ("moe", "exact"):
        confirmed = {"002-15", "002-19"}
        assert {id for id, claim in claims.items() if claim.verdict == "confirmed"} == confirmed
        assert {id for id, claim in claims.items() if claim.verdict == "contradicted"} == claims.keys() - confirmed
        assert "products of queries and keys: fp32 in place of bf16" in claims["002-16"].finding


def test_an_engine_holds_each_weight_in_what_the_architecture_says(paths: dict[str, Path]) -> None:
    """SGLang has GLM-4.5's routers in FP32, those of DeepSeek-V3 in BF16, and experts' biases in FP32."""
    for family, router in (("glm4_moe", "fp32"), ("deepseek_v3", "bf16")):
        found = {"model.layers.1.mlp.gate.weight": router, "model.layers.1.mlp.gate.e_score_correction_bias": "fp32"}
        held = [Holding(name, WEIGHTS, form, (1,), 4) for name, form in (found | {"model.norm.weight": "fp32"}).items()]
        (difference,) = differences_of(engine_holdings(held, read_model(paths[family]), plan("exact")))
        assert (difference.names, difference.expected, difference.found) == (("model.norm.weight",), "bf16", "fp32")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "merged"), [("moe", True), ("deepseek_v3", False)])
def test_adapters_are_multiplied_unquantized_beside_products_in_fp8(kind, merged, make, monkeypatch) -> None:
    numerics, adapter = plan("exact"), AdapterSection(rank=8, mode="merged" if merged else "separate")
    trainer = make(numerics, kind, adapter=adapter)
    batch = random_batch(rows=4, longest=40)
    trainer.train_step(batch, cross_entropy(batch))  # B is zero before the first update, which says nothing
    sightings = watched(trainer, numerics)
    assert differences_of(sightings) == []
    formats = found(sightings)
    assert formats["product.activation"] == formats["product.weight"] == formats["product.gradient"] == {"e4m3"}
    assert formats["adapter.operands"] == {"bf16"}
    assert formats["master"] == formats["moment"] == {"fp32"} and "gain.master" not in formats
    assert formats.get("adapter.merged") == ({"fp64"} if merged else None)
    if merged:
        return
    term = ops.low_rank_term  # planted: it is multiplied in FP8
    coarse = lambda h, *rest: term(fake_quantize(h, SPEC.activation, h.dtype), *rest)  # noqa: E731
    monkeypatch.setattr("fp8rl.numerics.ops.low_rank.low_rank_term", coarse)
    differences = differences_of(watched(trainer, numerics))
    assert [(each.key, each.found) for each in differences] == [("adapter.operands", "e4m3")]
    assert all(name.startswith("layers.") for name in differences[0].names)


@pytest.mark.slow
def test_a_step_that_is_watched_is_a_step(make: Callable[..., Any]) -> None:
    numerics, batch = plan("exact"), random_batch(rows=4, longest=40)
    trainer, alone = make(numerics), make(numerics)
    watched(trainer, numerics)
    alone.train_step(batch, cross_entropy(batch))
    others = dict(alone.model.named_parameters())
    assert all(torch.equal(p, others[name]) for name, p in trainer.model.named_parameters())
    assert trainer.weight_version == 1 and not {"grad_norm", "step"} & vars(trainer.optimizer).keys()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())


CHANNELS = {role: {"granularity": "channel"} for role in ("activation", "gradient")}


@pytest.mark.parametrize(
    ("changes", "gradient", "operands"),
    [({"trainer": "bf16"}, "bf16", "bf16"), ({"trainer": "fp8_forward"}, "bf16", "e4m3"),
     ({"spec": QuantSpec.preset("ironwood")}, "e5m2", "e4m3"),
     ({"spec": QuantSpec.preset("mxfp8"), "rollout": "bf16"}, "e4m3", "e4m3"),
     ({"spec": SPEC.override({"gradient": {"rounding": "stochastic"}} | CHANNELS)}, "e4m3", "e4m3")],
)  # fmt: skip
@pytest.mark.slow
def test_other_numerics_have_their_own_plan(changes, gradient, operands, make) -> None:
    numerics = plan("exact", **changes)
    sightings = watched(make(numerics), numerics)
    assert differences_of(sightings) == []
    formats = found(sightings)
    assert formats["product.gradient"] == {gradient}
    assert formats["product.activation"] == formats["product.weight"] == {operands}


@pytest.mark.slow
def test_a_layer_that_stays_in_bf16_is_planned_so_and_found_where_it_is_not(make: Callable[..., Any]) -> None:
    ends = plan("exact", spec=SPEC.override({"first_layers_bf16": 1}))
    trainer = make(ends)
    assert differences_of(watched(trainer, ends)) == []
    (difference, *_) = differences_of(watched(trainer, plan("exact")))
    assert (difference.key, difference.found) == ("product.activation", "bf16")
    assert all(name.startswith("layers.0.") for name in difference.names)


# What is planted is planted in the live trainer, after the plan.


def fp8_router(trainer: Any, _: Any) -> None:
    router = trainer.model.decoder.layers[1].mlp.router
    router.forward = lambda x: fp8_product(x, router.weight)


def fp8_head(trainer: Any, _: Any) -> None:
    head = trainer.model.output_layer
    head._forward_impl = lambda input, weight, **_: fp8_product(input, weight)


def fp8_product(x: Tensor, weight: Tensor) -> Tensor:
    return ops.fp8_linear(x, weight, ops.trained_operand(weight.detach(), SPEC.weight), SPEC)


def bf16_masters(trainer: Any, _: Any) -> None:
    """What an optimizer on BF16 weights keeps: every update is rounded as it lands."""
    for optimizer in trainer.optimizer.inner.chained_optimizers:
        optimizer.optimizer.register_step_post_hook(round_masters)


@torch.no_grad()
def round_masters(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for master in group["params"]:
            master.copy_(master.bfloat16())


def e5m2_gradients(trainer: Any, _: Any) -> None:
    trainer.set_numerics(replace(trainer.numerics, spec=SPEC.override({"gradient": {"format": "e5m2"}})))


def bf16_softmax(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("fp8rl.numerics.ops.attention")
    for name in ("_fold_queries", "_fold_keys"):
        fold = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, fold=fold: fold(*x).bfloat16())


def fp8_residual(trainer: Any, _: Any) -> None:
    coarse = lambda _, __, out: (fake_quantize(out[0], SPEC.activation), *out[1:])  # noqa: E731
    trainer.model.decoder.layers[0].register_forward_hook(coarse)


SOFTMAX = "scores.output", "softmax.output"
PLANTS = {
    "FP8 router": ("exact", fp8_router, "router.operands", "e4m3", "bf16", "layers.1.router"),
    "FP8 head": ("native", fp8_head, "head.operands", "e4m3", "bf16", "lm_head"),
    "BF16 masters": ("native", bf16_masters, "master", "bf16", "fp32", "embedding.word_embeddings.weight"),
    "E5M2 gradients": ("exact", e5m2_gradients, "product.gradient", "e5m2", "e4m3", "layers.0.qkv"),
    "BF16 softmax": ("exact", bf16_softmax, "softmax.reduction", "bf16", "fp32", "layers.0.attention"),
    "FP8 residual": ("native", fp8_residual, "residual", "e4m3", "bf16", "layers.0"),
}
"""The fifth, a cache of keys and values in another format, is the engine's: tests/e2e/test_native.py."""


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTS)
def test_what_is_planted_is_found_and_named(planted: str, make: Callable[..., Any], monkeypatch: Any) -> None:
    mode, plant, key, wrong, planned, name = PLANTS[planted]
    numerics = plan(mode)
    trainer = make(numerics)
    plant(trainer, monkeypatch)
    differences = differences_of(watched(trainer, numerics))
    found = {difference.key: difference for difference in differences}
    assert key in found and (found[key].found, found[key].expected) == (wrong, planned)
    assert name in found[key].names and found[key].remedy
    # And nothing else, but for what goes with it: gains have masters, too, and experts gradients.
    assert planted == "FP8 residual" or found.keys() <= {key, "gain.master", "experts.gradient", *SOFTMAX}


# Formats by value


@pytest.mark.parametrize(("form", "scale", "along"), [("e4m3", "pow2", 1), ("e5m2", "fp32", 0), ("e4m3", "fp32", 1)])
def test_values_tell_the_format(form: Any, scale: Any, along: int) -> None:
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    spec = TensorSpec(format=form, scale=scale)
    numerics = plan("native", spec=QuantSpec.preset("fp8_block_fp32") if scale == "fp32" else SPEC)
    quantized = fake_quantize(x, spec) if along == 1 else fake_quantize(x.t().contiguous(), spec).t()
    grids = Grids(numerics)
    assert grids.format(quantized, "activation") == form
    assert grids.format(x, "activation") == "bf16" and grids.format(x.float() / 3, "activation") == "fp32"
    assert grids.format(torch.zeros(300, 256), "activation") is None


def test_gradients_that_are_mostly_zero_are_judged_by_the_rest() -> None:
    """Tokens of prompts have gradients of zero, which are on every grid."""
    grids, x = Grids(plan("exact")), torch.zeros(1000, 128, dtype=torch.bfloat16)
    x[900:] = torch.randn(100, 128).bfloat16()
    assert grids.format(x, "gradient") == "bf16"


def test_one_number_in_each_group_tells_nothing() -> None:
    """A scale that is no power of two fits a single number: so is an expert's gradient of a single token."""
    grids, x = Grids(plan("native", spec=QuantSpec.preset("fp8_block_fp32"))), torch.zeros(128, 256)
    x[5] = torch.randn(256)
    quantized = fake_quantize(x.t().contiguous(), TensorSpec(scale="fp32")).t()
    assert grids.format(quantized, "activation") is None
    x[6] = torch.randn(256)
    quantized = fake_quantize(x.t().contiguous(), TensorSpec(scale="fp32")).t()
    assert grids.format(quantized, "activation") == "e4m3"


def test_fp32_numbers_that_are_all_bf16_are_bf16() -> None:
    x = torch.randn(100)
    assert stored(x) == "fp32" and stored(x.bfloat16().float()) == "bf16" and stored(torch.ones(10)) == "fp32"


# The map, the report and the claims


def test_tensors_of_one_class_are_one_finding_and_one_line() -> None:
    wrong = Sighting("engine.kv_cache", "k of layer 0", "e4m3", ("bf16",), bytes=7, side="engine")
    seen = [wrong, replace(wrong, name="v of layer 0"), Sighting("master", "w", "fp32", ("fp32",), bytes=4)]
    (only,) = differences_of(seen)
    assert (only.key, only.names) == ("engine.kv_cache", ("k of layer 0", "v of layer 0"))
    assert (only.expected, only.found) == ("bf16", "e4m3") and "--kv-cache-dtype" in only.remedy
    rows = rows_of(seen)
    assert "softmax.reduction" in unseen(rows) and not {"master", "router.logits"} & {*unseen(rows)}
    *_, master, _, cache = shown(map_table(rows, {"engine.kv_cache"})).strip().splitlines()
    assert master.split()[:3] == ["pass", "master", "fp32"]
    assert cache.split() == ["FAIL", "engine.kv_cache", "bf16", "e4m3", "x", "2", "14"]


@pytest.mark.parametrize(
    ("seen", "claim", "verdict"),
    [({}, "002-16", "undecided"),
     ({each.key: {each.document: 1} for each in CLASSES if each.document}, "002-16", "confirmed"),
     ({"softmax.reduction": {"fp32": 1}, "norm.reduction": {"bf16": 1}}, "002-18", "confirmed"),
     ({"product.activation": {"e4m3": 1}, "product.output": {"bf16": 2, "fp32": 1}}, "002-15", "contradicted"),
     ({key: {"fp32": 1} for key in (*BACKWARD, *OPTIMIZER)}, "002-17", "confirmed")],
)  # fmt: skip
def test_a_claim_is_judged_by_what_was_seen(seen: dict[str, dict[str, int]], claim: str, verdict: str) -> None:
    assert [each.verdict for each in answers(seen) if each.id == claim] == [verdict]
