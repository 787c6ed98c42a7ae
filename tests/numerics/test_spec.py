import json

import pytest
import yaml

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import ALL, PRESETS, QuantSpec, TensorSpec


@pytest.mark.parametrize("name", PRESETS)
def test_round_trips_through_yaml_and_json(name):
    spec = QuantSpec.preset(name)
    assert QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert QuantSpec.from_dict(yaml.safe_load(yaml.safe_dump(spec.to_dict()))) == spec


def test_digest_tells_specs_apart_and_nothing_else():
    digests = {QuantSpec.preset(name).digest() for name in PRESETS}
    assert len(digests) == len(PRESETS)
    spec = QuantSpec.preset("fp8_block_pow2")
    assert spec.override({"weight": {"scale": "fp32"}}).digest() != spec.digest()
    some = spec.override({"scope": ["experts.gate_proj", "experts.up_proj"]})
    assert some.override({"scope": sorted(some.scope, reverse=True)}).digest() == some.digest() != spec.digest()
    assert spec.override({"gradient": {"rounding": "stochastic"}}).digest() != spec.digest()
    assert spec.override({"gradient": {"fixed": 224}}) == spec.override({"gradient": {"fixed": 224.0}})
    assert spec.override({"gradient": {"fixed": 224}}).digest() not in digests | {spec.digest()}


@pytest.mark.parametrize(
    ("preset", "changes", "digest"),
    [
        ("bf16", {}, "436fb76a8e8cd83c"),
        ("fp8_block_pow2", {}, "3a8681a8b79b83d4"),
        ("fp8_block_fp32", {}, "6a37174535ec37b9"),
        ("mxfp8", {}, "0e5b8034147c878d"),
        ("ironwood", {}, "511abf58fcf40123"),
        ("fp8_block_pow2", {"last_layers_bf16": 1}, "7426e3a366c71985"),
        ("fp8_block_pow2", {"scope": ["experts.gate_proj", "experts.up_proj"]}, "2cd0f393afa0f3fe"),
        ("fp8_block_pow2", {"gradient": {"rounding": "stochastic"}}, "1fa6dedc0e7290cb"),
    ],
)
def test_digests_last(preset, changes, digest):
    """They are stored in checkpoints, manifests and capsules: what a spec says today it must say in later versions."""
    assert QuantSpec.preset(preset).override(changes).digest() == digest


def test_every_preset_has_its_digest_pinned():
    pinned = test_digests_last.pytestmark[0].args[1]
    assert {preset for preset, changes, _ in pinned if not changes} == PRESETS.keys()


def test_a_spec_that_lists_every_kind_as_files_once_did_means_all():
    spec = QuantSpec.preset("fp8_block_pow2")
    kinds = [*"q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()]
    once = spec.to_dict() | {"scope": [*kinds, *(f"experts.{kind}" for kind in kinds[4:])]}
    assert QuantSpec.from_dict(once) == spec and spec.scope == ALL
    assert spec.to_dict()["scope"] == "all"


def test_default_preset_quantizes_a_kind_that_nobody_has_thought_of():
    spec = QuantSpec.preset("fp8_block_pow2")
    assert all(spec.quantizes(kind) for kind in ("q_proj", "experts.down_proj", "q_a_proj"))
    assert (spec.weight.granularity, spec.activation.granularity) == ("block", "token_group")
    assert not QuantSpec.preset("bf16").quantizes("q_proj")


def test_scope_names_are_exact():
    spec = QuantSpec.preset("fp8_block_pow2").override({"scope": ["experts.gate_proj", "experts.up_proj"]})
    assert spec.quantizes("experts.up_proj") and not spec.quantizes("up_proj")
    with pytest.raises(UserError, match="scope: found 'q_proj', expected `all` or a list"):
        spec.override({"scope": "q_proj"})


def test_the_first_and_last_layers_may_stay_in_bf16():
    spec = QuantSpec.preset("fp8_block_pow2").override({"first_layers_bf16": 2, "last_layers_bf16": 1})
    in_fp8 = [spec.of_layer(layer, 6).quantizes("o_proj") for layer in range(6)]
    assert in_fp8 == [False, False, True, True, True, False]
    assert not any(spec.of_layer(layer, 2).quantized for layer in range(2))
    plain = QuantSpec.preset("fp8_block_pow2")
    assert plain.of_layer(0, 6) is plain
    assert len({s.digest() for s in (plain, spec, plain.override({"last_layers_bf16": 1}))}) == 3
    assert QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("count", [-1, 1.0, True, "1"])
def test_a_number_of_layers_is_a_number(count):
    with pytest.raises(UserError, match="last_layers_bf16: found .* expected a number of layers"):
        QuantSpec.preset("fp8_block_pow2").override({"last_layers_bf16": count})


@pytest.mark.parametrize("range_", [0, -224.0, True, "224", float("nan"), float("inf"), 1e-40, [-224, 224]])
def test_a_static_range_is_a_positive_number(range_):
    with pytest.raises(UserError, match=r"fixed: found .* expected the largest absolute value .* or null"):
        TensorSpec(fixed=range_)


def test_wrong_values_are_refused_with_the_choices():
    with pytest.raises(UserError, match="e4m3, e5m2"):
        TensorSpec(format="fp8")
    with pytest.raises(UserError, match="rounding: found 'up', expected one of nearest, stochastic"):
        TensorSpec(rounding="up")
    with pytest.raises(UserError, match="scale: found 'e4m0', expected one of fp32, pow2, e8m0"):
        TensorSpec(scale="e4m0")
    with pytest.raises(UserError, match="fp8_block_pow2"):
        QuantSpec.preset("fp8")
    with pytest.raises(UserError, match="granularity"):
        QuantSpec.preset("bf16").override({"weight": {"granular": "block"}})
    with pytest.raises(UserError, match="two FP8 operands"):
        QuantSpec.preset("fp8_block_pow2").override({"activation": {"format": "bf16"}})
    with pytest.raises(UserError, match="depend on its batch"):
        NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2").override({"activation": {"granularity": "tensor"}}))


def test_each_side_may_run_plain_bf16_under_the_same_spec():
    config = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"), trainer="bf16", k_splits=2)
    assert not config.trainer_spec.quantized and config.rollout_spec == config.spec
    assert NumericsConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
