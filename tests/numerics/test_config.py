"""Which specs the two sides can run exactly, and that the configuration survives the way to the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import PRESETS, QuantSpec

POW2, MX = QuantSpec.preset("fp8_block_pow2"), QuantSpec.preset("mxfp8")


@pytest.mark.parametrize("preset", PRESETS)
def test_it_survives_json(preset: str) -> None:
    numerics = NumericsConfig(spec=QuantSpec.preset(preset), trainer="fp8_forward", k_splits=2, kv="fp8", key_scale=2.0)
    assert NumericsConfig.from_dict(json.loads(json.dumps(numerics.to_dict()))) == numerics


def test_each_side_runs_the_spec_or_bf16() -> None:
    bf16 = QuantSpec.preset("bf16")
    mixed = NumericsConfig(spec=POW2, trainer="bf16", rollout="fp8")
    assert (mixed.trainer_spec, mixed.rollout_spec) == (bf16, POW2)
    mixed = NumericsConfig(spec=POW2, trainer="fp8_forward", rollout="bf16")
    assert (mixed.trainer_spec, mixed.rollout_spec) == (POW2, bf16)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"trainer": "fp16"}, "numerics.trainer: found 'fp16', expected one of bf16, fp8_forward, fp8"),
        ({"rollout": "fp8_forward"}, "numerics.rollout: found 'fp8_forward', expected one of bf16, fp8"),
        ({"mode": "fast"}, "numerics.mode: found 'fast', expected one of exact, native"),
        ({"router_replay": "on"}, "numerics.router_replay: found 'on', expected one of off, record, replay"),
        ({"kv": "fp4"}, "numerics.kv: found 'fp4', expected one of bf16, fp8"),
        ({"kv": "fp8", "mode": "native"}, "numerics.kv: found 'fp8 with numerics.mode=native', expected bf16"),
        ({"kv": "fp8", "key_scale": 3.0}, "numerics.key_scale: found 3.0, expected a power of two from 2"),
        ({"kv": "fp8", "value_scale": 0.0}, "numerics.value_scale: found 0.0, expected a power of two"),
        ({"kv": "fp8", "value_scale": 2.0**17}, "numerics.value_scale: found 131072.0, expected a power of two"),
        ({"value_scale": 0.5}, "numerics.value_scale: found 0.5, expected 1 with keys and values in BF16"),
        ({"k_splits": 0}, "numerics.k_splits: found 0"),
        ({"mode": "native", "k_splits": 2}, "numerics.k_splits: found 2, expected 1 in native mode"),
        ({"spec": POW2.override({"activation": {"granularity": "tensor"}})}, "activation.granularity: found 'tensor'"),
        ({"spec": POW2.override({"weight": {"granularity": "channel"}})}, "found 'e4m3 in channel granularity'"),
        ({"spec": POW2.override({"weight": {"format": "e5m2"}})}, "found 'e5m2 in block granularity'"),
        ({"spec": MX.override({"weight": {"group": 64}})}, "found 'e4m3 in token_group granularity'"),
        ({"spec": MX, "mode": "native"}, "found 'native with MXFP8 weights', expected exact"),
        ({"spec": POW2.override({"weight": {"scale": "e8m0"}})}, "weight.scale: found 'e8m0', expected pow2 or fp32"),
        ({"spec": POW2.override({"scope": ["o_proj"]})}, r"scope: found \['o_proj'\]"),
    ],
)
def test_what_cannot_run_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        NumericsConfig(**{"spec": POW2, **fields})


def test_a_scale_that_tokens_share_is_refused_in_exact_mode_only() -> None:
    shared = POW2.override({"activation": {"granularity": "tensor"}})
    NumericsConfig(mode="native", spec=shared)
    with pytest.raises(UserError, match="set numerics.mode to native"):
        NumericsConfig(mode="exact", spec=shared)
    NumericsConfig(mode="exact", spec=shared.override({"activation": {"fixed": 224}}))


@pytest.mark.parametrize("changes", [{"weight": {"granularity": "channel"}}, {"scope": ["o_proj"]}])
def test_a_bf16_engine_takes_any_weights_of_the_trainer(changes: dict[str, Any]) -> None:
    NumericsConfig(spec=POW2.override(changes), rollout="bf16")
