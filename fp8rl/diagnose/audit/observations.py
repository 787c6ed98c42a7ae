"""The sightings of an audit: tensors of one class at one place, in one format, on the engine and on the trainer.

The format of a tensor shows in its values: FP8 arithmetic that is emulated leaves BF16 tensors of FP8 values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.models import Model
from fp8rl.models.program import LOGITS, OpSite
from fp8rl.models.tensors import TensorRow, base_name
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.memory import Holding, format_of
from fp8rl.numerics.precision_map import Planned, precision_map
from fp8rl.numerics.quantize import fake_quantize
from fp8rl.numerics.spec import QuantSpec, Role, TensorSpec
from fp8rl.rollout.engine.plugin.state import DERIVED, KV_CACHE, SCALES, STATES

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer  # megatron is for the ranks, not for the driver


@dataclass(frozen=True)
class Observation:
    """Tensors of one class at one place, in one format."""

    key: str
    """The key of the tensors' class in the precision map."""
    name: str
    """The name of the module, the parameter, the tensor or the collective."""
    found: str
    """The tensors' format."""
    planned: tuple[str, ...]
    """Formats that are allowed for the tensors."""
    calls: int = 1
    """How often the tensors were seen."""
    bytes: int = 0
    """Bytes of tensors that are held or sent; 0 for tensors that only pass through a module."""


# What the engine holds, class by class of the precision map.


def engine_sightings(held: Iterable[Holding], model: Model, numerics: NumericsConfig) -> list[Observation]:
    """Return sightings in one rank's inventory (`rollout.engine.plugin.state.inventory`). numerics: as planned."""
    plan = precision_map(numerics)
    kinds = {SCALES: "engine.scale", DERIVED: "engine.derived", KV_CACHE: "engine.kv_cache", STATES: "engine.state"}
    found = []
    for each in held:
        key = kinds.get(each.kind)
        if key is None:
            row = model.tensors[base_name(each.name)[0]]
            key = "engine.weight" if model.quantizes(row, numerics.rollout_spec) else "engine.leftover"
        # A router or an expert's bias may be in FP32.
        formats = (format_of(row.served),) if key == "engine.leftover" else plan[key].formats
        found.append(Observation(key, each.name, each.format, formats, bytes=each.bytes))
    return found


# The ops of the trainer's model, or in native mode the modules that compute them, and the spec's plan for them.

Part = Literal["embedding", "head", "router", "attention", "product", "experts", "gate", "norm"]
"""The kind of an op or of a module. A product may contain a norm. A layer of experts contains its products, and so do
gated shared experts."""


_BEFORE_PRODUCTS: tuple[Part, ...] = ("embedding", "router", "attention", "experts", "gate")
"""Kinds that a module has even if it contains products."""


@dataclass(frozen=True)
class ModuleRole:
    path: str
    """Megatron's path of the module on this rank, or of the layer, and the op's name."""
    part: Part
    quantized: frozenset[bool] = frozenset({False})
    """Whether the spec quantizes the module's products; both values if it quantizes some of them."""


class Sites:
    """Finds one rank's ops or modules by path, and its parameters by class, with the parameters of adapters."""

    def __init__(self, trainer: Trainer, numerics: NumericsConfig) -> None:
        """numerics: the planned numerics."""
        self._by_path: dict[str, ModuleRole] = {}
        self.parameters: dict[str, Part] = {}
        definition, spec = trainer.definition, numerics.trainer_spec
        rows = {name: held[0] for name, held in trainer.weights.rows(trainer.model).items()}
        self._layers = {layer.layer_number - 1: at for at, layer in enumerate(trainer.model.decoder.layers)}
        self._exact = numerics.mode == "exact"
        computed: dict[str, set[OpSite]] = {}
        for site in definition.forward.sites():
            if site.layer is not None and site.layer not in self._layers:
                continue
            if path := self.path_of(site):
                computed.setdefault(path, set()).add(site)
        for path, sites in computed.items():
            held = [row for name, row in rows.items() if row.kind and self._inside(path, sites, name, row)]
            quantized = frozenset(definition.quantizes(row, spec) for row in held)
            if part := _part(sites, bool(held)):
                self._by_path[path] = ModuleRole(path, part, quantized or frozenset({False}))
        self.adapters = {name for name, row in rows.items() if row.adapts is not None}
        for name, row in rows.items():
            self.parameters[name] = self._part_of(name, row)

    def path_of(self, site: OpSite) -> str:
        """Return the path by which an op is known; empty if no module computes it."""
        if site.layer is None:
            return site.op.megatron
        inside = site.op.name if self._exact else site.op.megatron
        return f"decoder.layers.{self._layers[site.layer]}.{inside}" if inside else ""

    def _inside(self, path: str, sites: set[OpSite], name: str, row: TensorRow) -> bool:
        """Return whether a tensor is one of these ops', or is held by their module."""
        if self._exact and row.layer is not None:
            return any((site.layer, site.op.name) == (row.layer, row.op) for site in sites)
        return name.startswith(f"{path}.")

    def at(self, path: str) -> ModuleRole | None:
        """Return the innermost known module that contains a path."""
        while path:
            if path in self._by_path:
                return self._by_path[path]
            path = path.rpartition(".")[0]
        return None

    def exactly(self, path: str) -> ModuleRole | None:
        return self._by_path.get(path)

    def _part_of(self, name: str, row: TensorRow) -> Part:
        if row.kind is not None or row.adapts is not None:
            return "product" if row.expert is None else "experts"
        of_op = self._exact and row.layer is not None
        site = self.at(f"decoder.layers.{self._layers[row.layer]}.{row.op}" if of_op else name)  # type: ignore[index]
        if not row.product and site is not None and site.part != "embedding":
            return "norm"  # also inside another module
        part = site.part if site is not None else "norm"
        return "product" if part == "gate" else part


def _part(sites: set[OpSite], has_kinds: bool) -> Part | None:
    parts = {site.op.form.part for site in sites}
    if any(LOGITS in site.op.writes for site in sites):
        return "router" if all(site.layer is not None for site in sites) else "head"
    for part in _BEFORE_PRODUCTS:
        if part in parts:
            return part
    if has_kinds:
        return "product"
    return "norm" if "norm" in parts else None


# What stands in a rank's memory between two ops of a step, class by class of the precision map.

_WEIGHTS: dict[Part, str] = {
    "embedding": "embedding.weight",
    "head": "head.weight",
    "router": "router.weight",
    "norm": "gain.weight",
    "product": "product.shadow",
    "experts": "product.shadow",
}


def held_in_pass(trainer: Trainer, sites: Sites, plan: Mapping[str, Planned]) -> Iterator[Observation]:
    """Yield what is held after a backward: weights, the operands made of them, and gradients."""
    from fp8rl.trainer.inventory import inventory

    for each in inventory(trainer):
        part = sites.parameters.get(each.name)
        if part is not None:  # not padding
            keys = {"parameters": _WEIGHTS[part], "operands": "product.cached", "gradients": "gradient.buffer"}
            if key := keys.get(each.kind):
                yield Observation(key, each.name, each.format, plan[key].formats, bytes=each.bytes)


def held_by_optimizer(trainer: Trainer, sites: Sites, plan: Mapping[str, Planned]) -> Iterator[Observation]:
    """Yield what the optimizer holds after an update, with formats judged by value.

    Before an update masters have the checkpoint's values. A master whose moments are zero was never updated, so its
    format is its dtype.
    """
    from fp8rl.trainer.inventory import optimizer_state

    held = [(name.partition(":")[0], name, kind, tensor) for name, kind, tensor in optimizer_state(trainer)]
    updated = {parameter for parameter, _, kind, tensor in held if kind == "moments" and tensor.any()}
    for parameter, name, kind, tensor in held:
        if kind != "rest":
            gain = sites.parameters[parameter] == "norm"
            key = "moment" if kind == "moments" else "gain.master" if gain else "master"
            found = stored(tensor) if parameter in updated else format_of(tensor.dtype)
            yield Observation(key, name, found, plan[key].formats, bytes=tensor.nbytes)


ROWS = 256
"""The most rows of a matrix that are looked at."""
FEWEST = 64
"""The least numbers from which a format is judged: fewer may be on a grid by chance."""
SAME_CODE = 2.0**-18
"""Relative difference up to which two FP32 numbers count as the same code: products with FP32 scales are rounded."""


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

        None: the matrix has too few numbers to say.
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
    """Count the nonzero numbers, less one for each group: a group's scale always fits one of its numbers."""
    width = spec.block_shape(*x.shape)[1]
    full = F.pad(x, (0, -x.shape[1] % width)).reshape(-1, width).count_nonzero(1)
    return int((full - 1).clamp(min=0).sum())


def _sample(x: Tensor, *, block: bool) -> Tensor:
    """Return ROWS rows of a matrix: for blocks the first, else those with most nonzero numbers (gradients may be 0)."""
    if block or len(x) <= ROWS:
        return x[:ROWS].contiguous()
    return x[(x != 0).sum(1).topk(ROWS).indices]


def stored(x: Tensor) -> str:
    """Return the format of a tensor that is kept from step to step: BF16 if it has enough FP32 numbers, all BF16."""
    judged = x.dtype is torch.float32 and int(x.count_nonzero()) >= FEWEST
    return "bf16" if judged and torch.equal(x.bfloat16().float(), x) else format_of(x.dtype)


def _unchanged(x: Tensor, spec: TensorSpec) -> bool:
    again, x = fake_quantize(x, spec, torch.float32), x.float()
    return bool(((again - x).abs() <= SAME_CODE * x.abs()).all())
