"""The numerics of one run: the spec, and the precision in which each side runs it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from fp8rl.numerics.core.errors import UserError, raise_first, user_error
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
    its library's own ops. On a CPU neither library has FP8 products, so FP8 products run on `numerics.ops`."""
    spec: QuantSpec
    trainer: TrainerPrecision = "fp8"
    """`bf16`, `fp8_forward` (quantized forward, BF16 gradients) or `fp8` (quantized forward and backward)."""
    rollout: RolloutPrecision = "fp8"
    kv: KVPrecision = "bf16"
    """The format of keys and values, on both sides: `bf16` or `fp8`, which is E4M3. Exact mode only."""
    key_scale: float = 1.0
    """Keys are divided by this power of two before they are rounded. So are rows that are key and value in one."""
    value_scale: float = 1.0
    """Values are divided by this power of two before they are rounded."""
    k_splits: int = 1
    """The number of slices that K of a row-parallel product is cut into. Their FP32 sums are added in order. On both
    sides it is the larger tensor-parallel size of the two, and each rank has equally many slices. Exact mode only."""
    router_replay: RouterReplay = "off"
    """`record`: the engine reports the experts of each token, and the trainer reports the experts that it chose itself.
    `replay`: the trainer takes the engine's experts (R3)."""
    deepgemm: bool | None = None
    """Whether FP8 products run on DeepGEMM in exact mode. None: in each process where DeepGEMM gives the bits of our
    kernels. True: as None, but a process in which it cannot run refuses to start. False: in no process."""

    def __post_init__(self) -> None:
        raise_first(self._refusals())

    def _refusals(self) -> Iterator[UserError]:
        for key, kind in _CHOICES.items():
            if (found := getattr(self, key)) not in (allowed := get_args(kind)):
                yield user_error(f"numerics.{key}", found, f"one of {', '.join(allowed)}", "Set one of them.")
        activation, served, weight = self.spec.activation, self.rollout_spec, self.rollout_spec.weight
        native, plain = self.mode == "native", "or set numerics.rollout to bf16."
        own_scale = activation.granularity in ("token_group", "channel") or activation.fixed is not None
        if not native and self.spec.quantized and not own_scale:
            expected = "token_group or channel in exact mode, so that a token's scale does not depend on its batch"
            remedy = "Change it, give it a static range (numerics.activation.fixed), or set numerics.mode to native."
            yield user_error("numerics.activation.granularity", activation.granularity, expected, remedy)
        if served.quantized and not weight.mx and (weight.format, weight.granularity) != ("e4m3", "block"):
            found = f"{weight.format} in {weight.granularity} granularity"
            expected = "e4m3 in block granularity, or the weights of the preset mxfp8: an engine holds no other FP8"
            yield user_error("numerics.weight", found, expected, f"Change it, {plain}")
        if served.quantized and weight.mx and native:
            expected = "exact: SGLang has no products for such weights"
            yield user_error("numerics.mode", "native with MXFP8 weights", expected, f"Set it to exact, {plain}")
        if served.quantized and not weight.mx and weight.scale == "e8m0":
            expected = "pow2 or fp32: the engine holds scales in FP32"
            yield user_error("numerics.weight.scale", weight.scale, expected, f"Change it, {plain}")
        if served.quantized and self.spec.scope != ALL:
            expected = "all: the engine quantizes all module kinds or none"
            yield user_error("numerics.scope", sorted(self.spec.scope), expected, f"Leave it out, {plain}")
        if native and self.k_splits != 1:
            expected = "1 in native mode, where each side adds in its library's own order"
            yield user_error("numerics.k_splits", self.k_splits, expected, "Set it to 1, or numerics.mode to exact.")
        yield from kv_refusals(self.mode, self.kv, self.key_scale, self.value_scale)
        if self.deepgemm and native:
            expected = "false in native mode, where each side chooses its library's own products"
            yield user_error("numerics.deepgemm", True, expected, "Remove it, or set numerics.mode to exact.")
        if self.k_splits < 1:
            yield user_error("numerics.k_splits", self.k_splits, "at least 1", "Leave it out.")

    @property
    def trainer_spec(self) -> QuantSpec:
        """The spec that the trainer's forward runs: the run's spec, or plain BF16."""
        return self.spec if self.trainer != "bf16" else QuantSpec.preset("bf16")

    @property
    def rollout_spec(self) -> QuantSpec:
        """The spec that the engine runs. Weights are sent to the engine in this spec."""
        return self.spec if self.rollout != "bf16" else QuantSpec.preset("bf16")

    @property
    def kv_format(self) -> KVFormat:
        """The format in which the engine keeps keys and values, and the trainer attends to them."""
        return KVFormat(self.kv == "fp8", self.key_scale, self.value_scale)

    def with_bf16_kv(self) -> NumericsConfig:
        """Return these numerics with keys and values in BF16."""
        return dataclasses.replace(self, kv="bf16", key_scale=1.0, value_scale=1.0)

    def in_bf16(self) -> NumericsConfig:
        """Return these numerics with nothing in FP8, on either side."""
        return dataclasses.replace(self.with_bf16_kv(), trainer="bf16", rollout="bf16")

    @property
    def blocks_spec(self) -> QuantSpec:
        """The spec whose blocks no rank of trainer or engine may cut, even if only one side quantizes."""
        return self.rollout_spec if self.rollout_spec.quantized else self.trainer_spec

    def to_dict(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"spec": self.spec.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NumericsConfig:
        return cls(**{**data, "spec": QuantSpec.from_dict(data["spec"])})


def kv_refusals(mode: Mode, kv: KVPrecision, key_scale: float, value_scale: float) -> Iterator[UserError]:
    """Yield an error for each reason why keys and values cannot be kept in this precision with these scales."""
    if kv == "fp8" and mode == "native":
        expected = "bf16: Megatron's attention does not round keys and values as SGLang's cache does"
        remedy = "Set it to bf16, or numerics.mode to exact."
        yield user_error("numerics.kv", "fp8 with numerics.mode=native", expected, remedy)
    for key, scale in (("numerics.key_scale", key_scale), ("numerics.value_scale", value_scale)):
        if not 1 / _LARGEST_SCALE <= scale <= _LARGEST_SCALE or math.frexp(scale)[0] != 0.5:
            expected = "a power of two from 2^-16 to 2^16, so that dividing by it rounds nothing"
            yield user_error(key, scale, expected, "Set the nearest one, or leave it out.")
        if scale != 1.0 and kv == "bf16":
            remedy = "Set numerics.kv to fp8, or leave it out."
            yield user_error(key, scale, "1 with keys and values in BF16: it is for FP8", remedy)
