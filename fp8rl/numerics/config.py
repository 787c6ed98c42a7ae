"""The numerics of one run: the spec, and the precision in which each side runs it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.kv import KVFormat
from fp8rl.numerics.spec import ALL, QuantSpec

Mode = Literal["exact", "native"]
RouterReplay = Literal["off", "record", "replay"]
TrainerPrecision = Literal["bf16", "fp8_forward", "fp8"]
RolloutPrecision = Literal["bf16", "fp8"]
KVPrecision = Literal["bf16", "fp8"]

_CHOICES = {
    "mode": Mode,
    "trainer": TrainerPrecision,
    "rollout": RolloutPrecision,
    "kv": KVPrecision,
    "router_replay": RouterReplay,
}
_LARGEST_SCALE = 2.0**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """The numerics of one run, handed unchanged to the trainer and to the engine's plugin."""

    mode: Mode = "exact"
    """`exact`: both sides call the ops of `numerics.ops`, so that their logprobs are equal. `native`: each side calls
    its library's own ops; on a CPU, for which neither library has FP8 products, these alone are ours."""
    spec: QuantSpec
    """The quantization spec."""
    trainer: TrainerPrecision = "fp8"
    """`bf16`, `fp8_forward` (quantized forward, BF16 gradients) or `fp8` (quantized forward and backward)."""
    rollout: RolloutPrecision = "fp8"
    """`bf16` or `fp8`."""
    kv: KVPrecision = "bf16"
    """The format of keys and values, on both sides: `bf16` or `fp8`, which is E4M3. Exact mode only."""
    key_scale: float = 1.0
    """The power of two that keys, and rows that are key and value in one, are divided by before they are rounded."""
    value_scale: float = 1.0
    """The same for values."""
    k_splits: int = 1
    """The number of slices of K that a row-parallel product is cut into; their FP32 partials are added in order. It
    is the trainer's tensor-parallel size, on both sides, so that the engine adds in the trainer's order. Exact mode
    only."""
    router_replay: RouterReplay = "off"
    """`record`: the engine reports the experts of each token, and the trainer its own choice beside them. `replay`: the
    trainer takes the engine's (R3)."""
    deepgemm: bool | None = None
    """Run FP8 products on DeepGEMM in exact mode: None where its bits are those of our kernels, each process by itself;
    true likewise, but no process starts without it; false nowhere."""

    def __post_init__(self) -> None:
        for key, kind in _CHOICES.items():
            allowed = get_args(kind)
            if getattr(self, key) not in allowed:
                raise UserError(f"numerics.{key}: found {getattr(self, key)!r}, expected one of {', '.join(allowed)}")
        activation, weight = self.spec.activation, self.rollout_spec.weight
        own_scale = activation.granularity in ("token_group", "channel") or activation.fixed is not None
        if self.mode == "exact" and self.spec.quantized and not own_scale:
            raise UserError(
                f"numerics.activation.granularity: found {activation.granularity!r}, expected token_group or channel "
                "in exact mode; a scale that tokens share would make a token's logprob depend on its batch. Change it, "
                "give it a static range (numerics.activation.fixed), or set numerics.mode to native"
            )
        if self.rollout_spec.quantized and not weight.mx and (weight.format, weight.granularity) != ("e4m3", "block"):
            raise UserError(
                f"numerics.weight: found {weight.format} in {weight.granularity} granularity, expected e4m3 in block "
                "granularity, or that of the preset mxfp8: so the engine holds FP8 weights. Change it, or set "
                "numerics.rollout to bf16"
            )
        if self.rollout_spec.quantized and weight.mx and self.mode == "native":
            raise UserError(
                "numerics.mode: found 'native' with MXFP8 weights in the engine, expected exact, whose products are "
                "ours. Set numerics.mode to exact, or set numerics.rollout to bf16"
            )
        if self.rollout_spec.quantized and not weight.mx and weight.scale == "e8m0":
            raise UserError(
                "numerics.weight.scale: found 'e8m0', expected pow2 or fp32; the engine holds scales in FP32. "
                "Change it, or set numerics.rollout to bf16"
            )
        if self.rollout_spec.quantized and self.spec.scope != ALL:
            raise UserError(
                f"numerics.scope: found {sorted(self.spec.scope)}, expected all; the engine quantizes all module kinds "
                "or none. Leave it out, or set numerics.rollout to bf16"
            )
        if self.mode == "native" and self.k_splits != 1:
            raise UserError(
                f"numerics.k_splits: found {self.k_splits}, expected 1 in native mode, where each side adds in its "
                "library's own order. Set it to 1, or numerics.mode to exact"
            )
        check_kv(self.mode, self.kv, self.key_scale, self.value_scale)
        if self.deepgemm and self.mode == "native":
            raise UserError(
                "numerics.deepgemm: found true, expected false in native mode, where each side chooses its "
                "library's own products. Remove it, or set numerics.mode to exact"
            )
        if self.k_splits < 1:
            raise UserError(f"numerics.k_splits: found {self.k_splits}, expected the trainer's tp, at least 1")

    @property
    def trainer_spec(self) -> QuantSpec:
        """The spec that the trainer's forward runs: the run's spec, or plain BF16."""
        return self.spec if self.trainer != "bf16" else QuantSpec.preset("bf16")

    @property
    def rollout_spec(self) -> QuantSpec:
        """The spec that the engine runs, and so the one in which weights are sent to it."""
        return self.spec if self.rollout != "bf16" else QuantSpec.preset("bf16")

    @property
    def kv_format(self) -> KVFormat:
        """The format in which the engine keeps keys and values, and the trainer attends to them."""
        return KVFormat(self.kv == "fp8", self.key_scale, self.value_scale)

    def with_bf16_kv(self) -> NumericsConfig:
        """Return the same with keys and values in BF16."""
        return dataclasses.replace(self, kv="bf16", key_scale=1.0, value_scale=1.0)

    def in_bf16(self) -> NumericsConfig:
        """Return the same with nothing in FP8, on either side."""
        return dataclasses.replace(self.with_bf16_kv(), trainer="bf16", rollout="bf16")

    @property
    def blocks_spec(self) -> QuantSpec:
        """The spec whose blocks a layout must keep whole. Where one side alone quantizes, the other keeps them too."""
        return self.rollout_spec if self.rollout_spec.quantized else self.trainer_spec

    def to_dict(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"spec": self.spec.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NumericsConfig:
        return cls(**{**data, "spec": QuantSpec.from_dict(data["spec"])})


def check_kv(mode: Mode, kv: KVPrecision, key_scale: float, value_scale: float) -> None:
    """Raise `UserError` unless keys and values can be kept so."""
    if kv == "fp8" and mode == "native":
        raise UserError(
            "numerics.kv: found 'fp8' in native mode, expected bf16: Megatron's attention does not round keys and "
            "values as SGLang's cache does. Set it to bf16, or numerics.mode to exact"
        )
    for key, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if not 1 / _LARGEST_SCALE <= scale <= _LARGEST_SCALE or math.frexp(scale)[0] != 0.5:
            raise UserError(
                f"numerics.{key}: found {scale:g}, expected a power of two from 2^-16 to 2^16, by which division "
                "rounds nothing. Set the nearest one, or leave it out"
            )
        if scale != 1.0 and kv == "bf16":
            raise UserError(
                f"numerics.{key}: found {scale:g} with keys and values in BF16, expected 1: it is for FP8. Set "
                "numerics.kv to fp8, or leave it out"
            )
