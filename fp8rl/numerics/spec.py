"""Defines the quantization spec: the format and the scales of each tensor.

The trainer, the rollout engine, the weight sync and the converters read one `QuantSpec`. All FP8 settings of a library
are derived from it. Two sides compare its digest before they work together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from fp8rl.numerics.core.errors import UserError

Format = Literal["bf16", "e4m3", "e5m2"]
Granularity = Literal["tensor", "channel", "token_group", "block"]
Scale = Literal["fp32", "pow2", "e8m0"]
Rounding = Literal["nearest", "stochastic"]
Role = Literal["weight", "activation", "gradient"]

FORMATS: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ROLES: tuple[Role, ...] = get_args(Role)
LAYER_EXCEPTIONS = ("first_layers_bf16", "last_layers_bf16")

ALL: Literal["all"] = "all"
"""The scope of a spec that quantizes every module kind that the architecture of a model names."""
_ALL_ONCE = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("experts.gate_proj", "experts.up_proj", "experts.down_proj"),
)
"""The spelling of `all` in old files and digests. It never grows: a kind that comes later changes no digest."""
_ONCE_UNSAID = {"fixed": None, "rounding": "nearest"}
"""Keys that were added later, with the value that every earlier spec had in effect. A digest leaves out a key at this
value, so that older digests stay valid. Enter every new key here."""

# Of a static range: where scales and their inverses are normal FP32 numbers.
_SMALLEST_RANGE, _LARGEST_RANGE = 1e-30, 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """The storage of one role's tensors: format, granularity and kind of scales, rounding."""

    format: Format = "e4m3"
    """`e4m3` (largest value 448), `e5m2` (57344), or `bf16`, which means not quantized."""
    granularity: Granularity = "token_group"
    """The elements that share a scale: the whole `tensor`, a `channel` (one row), a `token_group` (1 x n elements of a
    row), or a `block` (n x n)."""
    group: int = 128
    """n of `token_group` and `block`, in elements."""
    scale: Scale = "pow2"
    """`pow2` rounds the scale down to a power of two, so that dequantized values are exact in BF16; `fp32` does not.
    `e8m0` is the scale of the MX formats (OCP MX 1.0): a power of two in one byte, chosen by the exponent of the
    block's largest value alone. Values above 1.75 times that exponent's power of two saturate; with `pow2` no value
    saturates. TransformerEngine's MXFP8 is `pow2` in groups of 32."""
    fixed: float | None = None
    """A static range: every block is scaled as if this were its largest absolute value, and larger values saturate.
    None: a dynamic range, each block's own largest value. Qwix's `fixed,-224,224` is 224: codes are twice the values,
    and every scale_inv is 0.5."""
    rounding: Rounding = "nearest"
    """`nearest`: to the nearest value of the format, ties to even. `stochastic`: to one of the two neighbouring values,
    the nearer the likelier, so that the mean error is 0. See `numerics.rounding.round_stochastically`."""

    def __post_init__(self) -> None:
        for key, kind in {"format": Format, "granularity": Granularity, "scale": Scale, "rounding": Rounding}.items():
            _check_choice(key, getattr(self, key), get_args(kind))
        if not isinstance(self.group, int) or isinstance(self.group, bool) or self.group < 1:
            raise UserError(f"group: found {self.group!r}, expected a positive number of elements, e.g. 128")
        if self.fixed is not None:
            number = isinstance(self.fixed, int | float) and not isinstance(self.fixed, bool)
            if not (number and _SMALLEST_RANGE <= self.fixed <= _LARGEST_RANGE):
                raise UserError(
                    f"fixed: found {self.fixed!r}, expected the largest absolute value of a static range, such as 224 "
                    f"(from {_SMALLEST_RANGE:g} to {_LARGEST_RANGE:g}), or null for a dynamic range"
                )
            object.__setattr__(self, "fixed", float(self.fixed))

    @property
    def quantized(self) -> bool:
        return self.format != "bf16"

    @property
    def dtype(self) -> torch.dtype:
        return FORMATS[self.format]

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float8_e8m0fnu if self.scale == "e8m0" else torch.float32

    @property
    def dequantized_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds a dequantized value exactly: BF16 for power-of-two scales, else FP32."""
        return torch.float32 if self.quantized and self.scale == "fp32" else torch.bfloat16

    @property
    def mx(self) -> bool:
        """True for OCP's MXFP8: 1 x 32 with E8M0 scales, without a static range."""
        return self == _MX

    @property
    def block_rows(self) -> int:
        """Number of rows of a weight that share a scale: `group` in granularity `block`, otherwise 1."""
        return self.group if self.granularity == "block" else 1

    def block_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return (rows, columns) of one scale's block in a [rows, columns] matrix."""
        return {
            "tensor": (max(rows, 1), max(columns, 1)),
            "channel": (1, max(columns, 1)),
            "token_group": (1, self.group),
            "block": (self.group, self.group),
        }[self.granularity]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """The numerical contract of a run. It is immutable, hashable, and the same for all sides that work together."""

    weight: TensorSpec
    """The format of the weight, as an operand of a quantized GEMM."""
    activation: TensorSpec
    """The format of the activation."""
    gradient: TensorSpec
    """The format of the gradient."""
    scope: frozenset[str] | Literal["all"] = ALL
    """The module kinds whose GEMMs are quantized, by the exact names that a model's architecture gives them, or `all`.
    Tensors of no kind (embeddings, lm_head, norms, router) stay in BF16. `models.architecture.check_scope` checks the
    names."""
    first_layers_bf16: int = 0
    """Number of decoder layers at the start that stay entirely in BF16."""
    last_layers_bf16: int = 0
    """Number of decoder layers at the end that stay entirely in BF16."""

    def __post_init__(self) -> None:
        if isinstance(self.scope, str) and self.scope != ALL:
            raise UserError(f"scope: found {self.scope!r}, expected `all` or a list of module kinds")
        if self.scope != ALL:
            kinds = frozenset(self.scope)
            object.__setattr__(self, "scope", ALL if kinds == set(_ALL_ONCE) else kinds)
        for key in LAYER_EXCEPTIONS:
            count = getattr(self, key)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise UserError(f"{key}: found {count!r}, expected a number of layers, 0 or more")
        if self.weight.quantized != self.activation.quantized:
            raise UserError(
                f"weight.format={self.weight.format} with activation.format={self.activation.format}: an FP8 GEMM "
                "takes two FP8 operands, so quantize both or neither"
            )
        if self.gradient.quantized and not self.weight.quantized:
            raise UserError("gradient.format is FP8 while weights are bf16: set gradient.format to bf16")

    @classmethod
    def preset(cls, name: str) -> QuantSpec:
        """Return a named spec.

        `bf16`. `fp8_block_pow2`, the default of the project. `fp8_block_fp32` (DeepSeek-style). `mxfp8` (OCP MX 1.0:
        1x32 with E8M0 scales in all roles). `ironwood` (Qwix on TPUs: weights and activations in the static range
        +-224, gradients in E5M2 with a dynamic scale per row).
        """
        _check_choice("preset", name, tuple(PRESETS))
        return PRESETS[name]

    @property
    def quantized(self) -> bool:
        return self.weight.quantized and bool(self.scope)

    def quantizes(self, kind: str) -> bool:
        """Return True if the GEMM of this module kind runs in FP8, in layers that `of_layer` does not leave in BF16."""
        return self.quantized and (self.scope == ALL or kind in self.scope)

    def of_layer(self, layer: int, layers: int) -> QuantSpec:
        """Return the spec of a layer, counted from 0: this spec, or plain BF16 for the exceptions at both ends."""
        exception = layer < self.first_layers_bf16 or layer >= layers - self.last_layers_bf16
        return PRESETS["bf16"] if exception else self

    def override(self, changes: Mapping[str, Any]) -> QuantSpec:
        """Return a copy with changes such as `{"weight": {"scale": "fp32"}, "scope": [...]}` applied.

        Raises `UserError` on an unknown key or value.
        """
        fields: dict[str, Any] = {}
        for key, value in changes.items():
            _check_choice("key", key, (*ROLES, "scope", *LAYER_EXCEPTIONS))
            if key not in ROLES:
                fields[key] = value
                continue
            names = [f.name for f in dataclasses.fields(TensorSpec)]
            for sub in value:
                _check_choice(f"key of {key}", sub, tuple(names))
            fields[key] = dataclasses.replace(getattr(self, key), **value)
        return dataclasses.replace(self, **fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for YAML and JSON; `from_dict` restores an equal spec."""
        roles = {role: _said(dataclasses.asdict(getattr(self, role))) for role in ROLES}
        scope = ALL if self.scope == ALL else sorted(self.scope)
        return _said(roles | {"scope": scope} | {key: getattr(self, key) for key in LAYER_EXCEPTIONS})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QuantSpec:
        keys = {*ROLES, "scope", *LAYER_EXCEPTIONS}
        if not keys - _ONCE_UNSAID.keys() <= set(data) <= keys:
            raise UserError(f"quantization spec: found the keys {sorted(data)}, expected {sorted(keys)}")
        fields: dict[str, Any] = {key: TensorSpec(**data[key]) if key in ROLES else data[key] for key in data}
        return cls(**fields)

    def digest(self) -> str:
        """Return 16 hex digits of the SHA-256 over the canonical JSON. Equal specs have equal digests, also if one was
        written by an older version."""
        data = self.to_dict() | {"scope": sorted(_ALL_ONCE if self.scope == ALL else self.scope)}
        canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in _ONCE_UNSAID or value != _ONCE_UNSAID[key]}


def _check_choice(key: str, found: Any, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise UserError(f"{key}: found {found!r}, expected one of {', '.join(map(str, allowed))}")


def _block_fp8(scale: Scale) -> QuantSpec:
    return QuantSpec(
        weight=TensorSpec(granularity="block", scale=scale),
        activation=TensorSpec(scale=scale),
        gradient=TensorSpec(scale=scale),
    )


_BF16 = TensorSpec(format="bf16", granularity="tensor")
_MX = TensorSpec(group=32, scale="e8m0")
PRESETS: dict[str, QuantSpec] = {
    "bf16": QuantSpec(weight=_BF16, activation=_BF16, gradient=_BF16, scope=frozenset()),
    "fp8_block_pow2": _block_fp8("pow2"),
    "fp8_block_fp32": _block_fp8("fp32"),
    "mxfp8": QuantSpec(weight=_MX, activation=_MX, gradient=_MX),
    # A static scale is one number, whatever shares it: in blocks and groups an engine and kernels know their way.
    "ironwood": QuantSpec(
        weight=TensorSpec(granularity="block", fixed=224.0),
        activation=TensorSpec(fixed=224.0),
        gradient=TensorSpec(format="e5m2", granularity="channel", scale="fp32"),
    ),
}
