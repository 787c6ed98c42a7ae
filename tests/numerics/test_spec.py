"""Specs and configurations: what survives storage, which specs both sides can run exactly, and what is refused."""

import json
from math import inf, nan

import pytest
import yaml

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import ALL, PRESETS, QuantSpec, TensorSpec

BF16, POW2, MX = (QuantSpec.preset(name) for name in ("bf16", "fp8_block_pow2", "mxfp8"))
SOME = {"scope": ["experts.gate_proj", "experts.up_proj"]}
SHARED_SCALES = {"activation": {"granularity": "tensor"}}


@pytest.mark.parametrize("name", PRESETS)
def test_specs_and_configurations_survive_yaml_and_json(name):
    spec = QuantSpec.preset(name)
    assert QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert QuantSpec.from_dict(yaml.safe_load(yaml.safe_dump(spec.to_dict()))) == spec
    numerics = NumericsConfig(spec=spec, trainer="fp8_forward", k_splits=2, kv="fp8", key_scale=2.0)
    assert NumericsConfig.from_dict(json.loads(json.dumps(numerics.to_dict()))) == numerics


def test_digest_tells_specs_apart_and_nothing_else():
    digests = {QuantSpec.preset(name).digest() for name in PRESETS}
    assert len(digests) == len(PRESETS) and POW2.override({"weight": {"scale": "fp32"}}).digest() != POW2.digest()
    some = POW2.override(SOME)
    assert some.override({"scope": sorted(some.scope, reverse=True)}).digest() == some.digest() != POW2.digest()
    assert POW2.override({"gradient": {"fixed": 224}}) == POW2.override({"gradient": {"fixed": 224.0}})
    assert POW2.override({"gradient": {"fixed": 224}}).digest() not in digests


@pytest.mark.parametrize(
    ("preset", "changes", "digest"),
    [("bf16", {}, "436fb76a8e8cd83c"), ("fp8_block_pow2", {}, "3a8681a8b79b83d4"),
     ("fp8_block_fp32", {}, "6a37174535ec37b9"), ("mxfp8", {}, "0e5b8034147c878d"),
     ("ironwood", {}, "511abf58fcf40123"), ("fp8_block_pow2", {"last_layers_bf16": 1}, "7426e3a366c71985"),
     ("fp8_block_pow2", SOME, "2cd0f393afa0f3fe"),
     ("fp8_block_pow2", {"gradient": {"rounding": "stochastic"}}, "1fa6dedc0e7290cb")],
)  # fmt: skip
def test_digests_last(preset, changes, digest):
    """They are stored in checkpoints, manifests and capsules: what a spec says today it must say in later versions."""
    assert QuantSpec.preset(preset).override(changes).digest() == digest


def test_every_preset_has_its_digest_pinned():
    pinned = test_digests_last.pytestmark[0].args[1]
    assert {preset for preset, changes, _ in pinned if not changes} == PRESETS.keys()


def test_a_scope_means_exact_names_and_all_means_kinds_that_nobody_has_thought_of():
    assert all(POW2.quantizes(kind) for kind in ("q_proj", "experts.down_proj", "q_a_proj"))
    assert POW2.override(SOME).quantizes("experts.up_proj") and not POW2.override(SOME).quantizes("up_proj")
    assert not BF16.quantizes("q_proj")
    # Files once listed every kind.
    kinds = [*"q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()]
    once = POW2.to_dict() | {"scope": [*kinds, *(f"experts.{kind}" for kind in kinds[4:])]}
    assert QuantSpec.from_dict(once) == POW2 and POW2.scope == ALL and POW2.to_dict()["scope"] == "all"


def test_the_first_and_last_layers_may_stay_in_bf16():
    spec = POW2.override({"first_layers_bf16": 2, "last_layers_bf16": 1})
    in_fp8 = [spec.of_layer(layer, 6).quantizes("o_proj") for layer in range(6)]
    assert in_fp8 == [False, False, True, True, True, False]
    assert not any(spec.of_layer(layer, 2).quantized for layer in range(2)) and POW2.of_layer(0, 6) is POW2
    assert len({each.digest() for each in (POW2, spec, POW2.override({"last_layers_bf16": 1}))}) == 3
    assert QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("made", "said"),
    [(lambda: TensorSpec(rounding="up"), "rounding: found 'up', expected one of nearest, stochastic"),
     (lambda: QuantSpec.preset("fp8"), "fp8_block_pow2"),
     (lambda: BF16.override({"weight": {"granular": "block"}}), "granularity"),
     (lambda: POW2.override({"activation": {"format": "bf16"}}), "two FP8 operands"),
     *((lambda count=count: POW2.override({"last_layers_bf16": count}), "a number of layers") for count in (-1, True)),
     *((lambda x=x: TensorSpec(fixed=x), "the largest absolute value .* or null") for x in (0, True, nan, inf, 1e-40)),
     (lambda: POW2.override({"scope": "q_proj"}), "scope: found 'q_proj', expected `all` or a list")],
)  # fmt: skip
def test_what_no_spec_says_is_refused_with_the_choices(made, said):
    with pytest.raises(UserError, match=said):
        made()


def test_each_side_runs_the_spec_or_bf16() -> None:
    mixed = NumericsConfig(spec=POW2, trainer="bf16", rollout="fp8")
    assert (mixed.trainer_spec, mixed.rollout_spec) == (BF16, POW2)
    mixed = NumericsConfig(spec=POW2, trainer="fp8_forward", rollout="bf16")
    assert (mixed.trainer_spec, mixed.rollout_spec) == (POW2, BF16)
    # A BF16 engine takes any weights of the trainer, and in native mode tokens may share a scale.
    NumericsConfig(spec=POW2.override({"weight": {"granularity": "channel"}, "scope": ["o_proj"]}), rollout="bf16")
    NumericsConfig(spec=POW2.override(SHARED_SCALES), mode="native")
    NumericsConfig(spec=POW2.override({"activation": {"granularity": "tensor", "fixed": 224}}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"trainer": "fp16"}, "numerics.trainer: found 'fp16', expected one of bf16, fp8_forward, fp8"),
     ({"kv": "fp8", "mode": "native"}, "numerics.kv: found 'fp8 with numerics.mode=native', expected bf16"),
     ({"kv": "fp8", "key_scale": 3.0}, "numerics.key_scale: found 3.0, expected a power of two from 2"),
     ({"value_scale": 0.5}, "numerics.value_scale: found 0.5, expected 1 with keys and values in BF16"),
     ({"k_splits": 0}, "numerics.k_splits: found 0"),
     ({"mode": "native", "k_splits": 2}, "numerics.k_splits: found 2, expected 1 in native mode"),
     ({"spec": POW2.override(SHARED_SCALES)}, "activation.granularity: found 'tensor'.*set numerics.mode to native"),
     ({"spec": POW2.override({"weight": {"granularity": "channel"}})}, "found 'e4m3 in channel granularity'"),
     ({"spec": MX, "mode": "native"}, "found 'native with MXFP8 weights', expected exact"),
     ({"spec": POW2.override({"weight": {"scale": "e8m0"}})}, "weight.scale: found 'e8m0', expected pow2 or fp32"),
     ({"spec": POW2.override({"scope": ["o_proj"]})}, r"scope: found \['o_proj'\]")],
)  # fmt: skip
def test_what_cannot_run_is_refused(fields, said: str) -> None:
    with pytest.raises(UserError, match=said):
        NumericsConfig(**{"spec": POW2, **fields})
