"""Finds the format of each tensor of the precision map by watching the ops of the trainer or the engine.

`Recorder` is a watcher of the ops' dispatcher (`numerics.backend.dispatch`). Emulated FP8 keeps FP8 values in BF16
tensors, so a tensor's values show its format. A quantized product quantizes its rows and gradients itself, so their
formats are read from the op's arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.models.architecture import Model
from fp8rl.models.program import EMBED, LOGITS, PROGRAM, RESIDUAL, OpSite
from fp8rl.numerics.backend import dispatch
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.memory import format_of, tensors_in
from fp8rl.numerics.quantize import fake_quantize
from fp8rl.numerics.spec import QuantSpec, Role, TensorSpec

Side = Literal["trainer", "engine"]


@dataclass(frozen=True)
class Sighting:
    """Tensors of one class that were seen in one op or parameter, in one format."""

    key: str
    """The key of the tensors' class in the precision map."""
    name: str
    """The name of the op, the parameter or the tensor."""
    found: str
    """The tensors' format."""
    planned: tuple[str, ...]
    """Formats that are allowed for the tensors."""
    calls: int = 1
    """How often the tensors were seen."""
    bytes: int = 0
    """Bytes of tensors that are held or sent; 0 for tensors that only pass through an op."""
    side: Side = "trainer"


WHOLE = {"linear", "fp8_linear", "rows_linear"}
PRODUCTS = {*WHOLE, "linear_partial", "fp8_linear_partial", "norm_fp8_linear", "grouped_linear"}
"""Ops that compute one product, or one per expert. WHOLE: ops that return a projection's whole output."""
TERMS = {"low_rank_term", "grouped_low_rank_term"}
RESULTS = {
    "norm_rows": "norm.output",
    "route": "router.probabilities",
    "route_sigmoid": "router.probabilities",
    "routed_experts": "experts.output",
    "combine": "experts.output",
    "token_logprobs": "loss.reduction",
}
"""The class of each op's (first) result. BY_NAME: the same for all ops whose names end so."""
BY_NAME = {"rms_norm": "norm.output", "attention": "attention.output"}
BY_DTYPE = {"router.probabilities", "router.logits", "loss.reduction"}
"""Classes whose results may have too few values to judge. Their format is the dtype."""


class Recorder:
    """Collects the formats that are seen in one process. numerics: the planned numerics. plan: see
    `precision_map.precision_map`. adapters: the addresses of adapters' tensors.
    """

    def __init__(
        self,
        model: Model,
        numerics: NumericsConfig,
        plan: Mapping[str, tuple[str, ...]],
        side: Side,
        adapters: Collection[int] = (),
    ) -> None:
        self._model, self._plan, self._side, self._adapters = model, plan, side, adapters
        self._spec = numerics.trainer_spec if side == "trainer" else numerics.rollout_spec
        self.grids = Grids(numerics)
        self._seen: Counter[Sighting] = Counter()
        self._bytes: Counter[Sighting] = Counter()

    def sightings(self) -> list[Sighting]:
        return [replace(seen, calls=calls, bytes=self._bytes[seen]) for seen, calls in self._seen.items()]

    def __call__(self, op: str, given: Mapping[str, Any], made: Any) -> None:
        """Watch a call of an op, or a tensor that a definition shows."""
        site: OpSite | None = dispatch.place
        if op == PROGRAM:
            *_, written = made
            if dispatch.place.op.form is EMBED:
                self.note("embedding.output", _name(site), self.found("embedding.output", written[0]))
            elif RESIDUAL in dispatch.place.op.writes and self._side == "engine":  # the trainer's has a gradient
                stream = written[dispatch.place.op.writes.index(RESIDUAL)]
                self.note("residual", f"layers.{dispatch.place.layer}", self.found("residual", stream))
        elif op == "adapter.operands":
            self._adapted(site, made)
        elif op in self._plan:
            self.note(op, _name(site), format_of(made.dtype), size=made.nbytes if "wire" in op else 0)
        elif op in PRODUCTS:
            self._multiplied(op, given, made, site)
        elif op in ("experts", "routed_experts"):  # a kernel does not call their products one by one
            for weights in (given["w13"], given["w2"]):
                arguments = {"weights": weights.weights, "operand": weights.operand} | dict(given)
                self._multiplied("grouped_linear", arguments, None, site)
        elif op in TERMS:
            self._adapted(site, given["h"], given["b"])
        elif op == "head_linear" and self._is_adapter(given["weight"]):
            self._adapted(site, given["x"], given["weight"])
        key = RESULTS.get(op) or next((key for end, key in BY_NAME.items() if op.endswith(end)), None)
        if key is not None:
            result = made[0] if isinstance(made, tuple) else made
            self.note(key, _name(site), self.found(key, result))

    def found(self, key: str, x: Tensor) -> str | None:
        """Return the format of a result."""
        return format_of(x.dtype) if key in BY_DTYPE else self.grids.format(x, "activation")

    def note(self, key: str, name: str, found: str | None, site: OpSite | None = None, size: int = 0) -> None:
        """Note a tensor. found: None if its numbers are too few to judge. site: the op, if it is a product, which the
        spec may leave in BF16."""
        if found is None:
            return
        formats = self._plan[key]
        if site is not None:
            plans = [formats if quantized else ("bf16",) for quantized in sorted(self._quantized(site))]
            formats = tuple(dict.fromkeys(chain.from_iterable(plans)))
        seen = Sighting(key, name, found, formats, side=self._side)
        self._seen[seen] += 1
        self._bytes[seen] += size

    def _multiplied(self, op: str, given: Mapping[str, Any], made: Any, site: OpSite | None) -> None:
        """Note the formats of a product's operands and of its gradients."""
        x, operand, spec = given.get("x"), given.get("operand"), given.get("spec")
        weight = given.get("weights" if op == "grouped_linear" else "weight")
        if x is not None and not x.numel():
            return
        if operand is None and self._is_adapter(weight):
            self._adapted(site, x, weight)
            return
        found: dict[Role, str | None] = {}
        if operand is None or (spec is None and op != "rows_linear"):
            assert x is not None and weight is not None
            found = {"activation": self.grids.format(x, "activation"), "weight": format_of(weight.dtype)}
            gradient = format_of(x.dtype)
        else:
            found["weight"] = self.grids.format(next(tensors_in(operand)), "weight")
            if spec is not None:
                found["activation"] = spec.activation.format
            else:
                found["activation"] = self.grids.format(next(tensors_in(given["rows"])), "activation")
            gradient = spec.gradient.format if given.get("backward", "fp8") == "fp8" and spec is not None else "bf16"
        if torch.is_grad_enabled() and self._side == "trainer":
            found["gradient"] = gradient
        part = None if site is None else part_of(site)
        for role, form in found.items():
            if part in ("head", "router"):
                self.note(f"{part}.operands", _name(site), form)
            else:
                self.note(f"{'experts' if op == 'grouped_linear' else 'product'}.{role}", _name(site), form, site)
        key = f"{part}.logits" if part in ("head", "router") else "product.output" if op in WHOLE else None
        if key is not None:
            self.note(key, _name(site), self.found(key, made))

    def _adapted(self, site: OpSite | None, *operands: Any) -> None:
        for x in operands:
            wide = stored(x)
            found = self.grids.format(x.bfloat16(), "activation") if wide == "bf16" else wide
            self.note("adapter.operands", _name(site), found)

    def _is_adapter(self, weight: Any) -> bool:
        return isinstance(weight, Tensor) and address(weight) in self._adapters

    def _quantized(self, site: OpSite) -> set[bool]:
        """Return {True} if the spec quantizes all products of an op, {False} if none, {True, False} if some."""
        rows = self._model.tensors.in_layer.get(site.layer, ())
        held = {self._model.quantizes(r, self._spec) for r in rows if r.kind is not None and r.op == site.op.name}
        return held or {False}


def own_formats(model: Model) -> dict[str, str]:
    """Return formats of a model's ops that differ from the precision map, by key of the map."""
    return {key: form for site in model.forward.sites() for key, form in site.op.form.formats.items()}


def _name(site: OpSite | None) -> str:
    return "loss" if site is None else site.op.name if site.layer is None else f"layers.{site.layer}.{site.op.name}"


def part_of(site: OpSite) -> str | None:
    """Return `head` or `router` if an op writes logits, else `OpForm.part`: None for a product."""
    if LOGITS in site.op.writes:
        return "head" if site.layer is None else "router"
    return site.op.form.part


def address(x: Tensor) -> int:
    """Return the address of a tensor's memory, which views share."""
    return x.untyped_storage().data_ptr()


# Formats by value.

ROWS = 256
"""The most rows of a matrix that are looked at."""
FEWEST = 64
"""Least count of numbers that show a format: fewer may be on a grid by chance."""
SAME_CODE = 2.0**-18
"""Two FP32 numbers count as one code up to this relative difference, because a code times an FP32 scale is rounded."""


class Grids:
    """The FP8 grids that the operands of one run may be on, the coarsest first."""

    def __init__(self, numerics: NumericsConfig) -> None:
        default = QuantSpec.preset("fp8_block_pow2")
        self._specs: dict[Role, list[TensorSpec]] = {}
        for role in ("weight", "activation", "gradient"):
            planned: TensorSpec = getattr(numerics.spec, role)
            basis = planned if planned.quantized else getattr(default, role)
            scales = dict.fromkeys((basis.scale, "pow2"))
            self._specs[role] = [
                replace(basis, format=f, scale=s, rounding="nearest") for f in ("e5m2", "e4m3") for s in scales
            ]

    def format(self, x: Tensor, role: Role) -> str | None:
        """Return the narrowest format that represents a matrix [.., R, C] exactly, in groups along either axis.

        None: the matrix has too few numbers to judge.
        """
        if x.dtype not in (torch.bfloat16, torch.float32):
            return format_of(x.dtype)
        matrix = x.detach().reshape(-1, x.shape[-1])
        ways = [_sample(way, block=role == "weight") for way in (matrix, matrix.t())]
        specs = self._specs[role]
        telling = [way for way in ways if _evidence(way, specs[0]) >= FEWEST]
        on_grid = (spec.format for spec in specs for way in telling if _unchanged(way, spec))
        return next(on_grid, format_of(x.dtype) if len(telling) == len(ways) else None)


def _evidence(x: Tensor, spec: TensorSpec) -> int:
    """Count the nonzero numbers, less one for each group, because its scale always fits one number."""
    width = spec.block_shape(*x.shape)[1]
    full = F.pad(x, (0, -x.shape[1] % width)).reshape(-1, width).count_nonzero(1)
    return int((full - 1).clamp(min=0).sum())


def _sample(x: Tensor, *, block: bool) -> Tensor:
    """Return ROWS rows of a matrix: the first for blocks, else the rows with most nonzero numbers (gradients may be
    0)."""
    if block or len(x) <= ROWS:
        return x[:ROWS].contiguous()
    return x[(x != 0).sum(1).topk(ROWS).indices]


def stored(x: Tensor) -> str:
    """Return the format of a tensor kept between steps: BF16 if it has FEWEST FP32 numbers, all with BF16 values."""
    judged = x.dtype is torch.float32 and int(x.count_nonzero()) >= FEWEST
    return "bf16" if judged and torch.equal(x.bfloat16().float(), x) else format_of(x.dtype)


def _unchanged(x: Tensor, spec: TensorSpec) -> bool:
    again, x = fake_quantize(x, spec, torch.float32), x.float()
    return bool(((again - x).abs() <= SAME_CODE * x.abs()).all())
