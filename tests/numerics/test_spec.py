import json

import pytest
import yaml

from numerics.config import NumericsConfig
from numerics.errors import UserError
from numerics.spec import MODULE_KINDS, PRESETS, QuantSpec, TensorSpec


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
    assert spec.override({"scope": sorted(spec.scope, reverse=True)}).digest() == spec.digest()
    assert spec.digest() == "0084944d139c8358", "the digest is stored in checkpoints: it must not change by accident"


def test_default_preset_quantizes_every_gemm_of_the_layers():
    spec = QuantSpec.preset("fp8_block_pow2")
    assert all(spec.quantizes(kind) for kind in MODULE_KINDS)
    assert (spec.weight.granularity, spec.activation.granularity) == ("block", "token_group")
    assert not any(QuantSpec.preset("bf16").quantizes(kind) for kind in MODULE_KINDS)


def test_scope_names_are_exact():
    spec = QuantSpec.preset("fp8_block_pow2").override({"scope": ["experts.gate_proj", "experts.up_proj"]})
    assert spec.quantizes("experts.up_proj") and not spec.quantizes("up_proj")
    with pytest.raises(UserError, match="gate"):
        spec.override({"scope": ["gate"]})
    with pytest.raises(UserError, match="fused"):
        spec.override({"scope": ["q_proj"]})
    with pytest.raises(UserError, match="expected one of"):
        spec.quantizes("lm_head")


def test_wrong_values_are_refused_with_the_choices():
    with pytest.raises(UserError, match="e4m3, e5m2"):
        TensorSpec(format="fp8")
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
