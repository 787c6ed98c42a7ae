"""The sightings of an audit: tensors of one class at one place, in one format, on the engine and on the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fp8rl.diagnose.audit.formats import stored
from fp8rl.models import Model
from fp8rl.models.tensors import TensorRow, base_name
from fp8rl.models.trace import LINEAR, OpForm
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.memory import Holding, format_of
from fp8rl.numerics.precision_map import Planned, precision_map
from fp8rl.rollout.engine.plugin.state import DERIVED, KV_CACHE, SCALES, STATES

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer  # megatron is for the ranks, not for the driver


@dataclass(frozen=True)
class Observation:
    """Tensors of one class at one place, in one format."""

    key: str
    """Of their class in the precision map."""
    name: str
    """Of the module, the parameter, the tensor or the collective."""
    found: str
    """Their format."""
    planned: tuple[str, ...]
    """Formats that will do there."""
    calls: int = 1
    """How often they were seen."""
    bytes: int = 0
    """Of what is held or sent; 0 for what passes."""


# What the engine holds, class by class of the precision map.


def engine_sightings(held: Iterable[Holding], model: Model, numerics: NumericsConfig) -> list[Observation]:
    """held: one rank's inventory (`rollout.engine.plugin.state.inventory`). numerics: as planned."""
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


# The modules of the trainer's model that compute each op of the forward, and the spec's plan for them.

Part = Literal["embedding", "head", "router", "attention", "product", "experts", "gate", "norm"]
"""The kind of a module. A product may have a norm inside; a layer of experts, and shared ones behind a gate, have their
products inside."""


_BEFORE_PRODUCTS: tuple[Part, ...] = ("embedding", "router", "attention", "experts", "gate")
"""Kinds that a module has whatever else is in it."""


@dataclass(frozen=True)
class ModuleRole:
    """One module of the trainer."""

    path: str
    """Megatron's, of this rank."""
    part: Part
    quantized: frozenset[bool] = frozenset({False})
    """The spec's answers for the products in it: both where it says no to one and yes to another."""


class Sites:
    """The modules of one rank, found by path, its parameters by what they are, and those of them that adapt others."""

    def __init__(self, trainer: Trainer, numerics: NumericsConfig) -> None:
        """numerics: as planned."""
        self._by_path: dict[str, ModuleRole] = {}
        self.parameters: dict[str, Part] = {}
        definition, spec = trainer.definition, numerics.trainer_spec
        rows = {name: held[0] for name, held in trainer.weights.rows(trainer.model).items()}
        heads = _heads(trainer)
        for path, seen in _forms(trainer).items():
            inside = [row for name, row in rows.items() if name.startswith(f"{path}.") and row.kind]
            quantized = frozenset(definition.quantizes(row, spec) for row in inside)
            if part := _part(seen, bool(inside), path in heads):
                self._by_path[path] = ModuleRole(path, part, quantized or frozenset({False}))
        self.adapters = {name for name, row in rows.items() if row.adapts is not None}
        for name, row in rows.items():
            self.parameters[name] = self._part_of(name, row)

    def at(self, path: str) -> ModuleRole | None:
        """The innermost module that is known, of those around a path."""
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
        site = self.at(name)
        if not row.product and site is not None and site.part != "embedding":
            return "norm"  # also inside another module
        part = site.part if site is not None else "norm"
        return "product" if part == "gate" else part


def _forms(trainer: Trainer) -> Mapping[str, set[OpForm]]:
    """The forms of the ops that each module computes, by its path on this rank."""
    local = {layer.layer_number - 1: index for index, layer in enumerate(trainer.model.decoder.layers)}
    forms: dict[str, set[OpForm]] = {}
    for site in trainer.definition.forward.sites():
        if not site.op.megatron or (site.layer is not None and site.layer not in local):
            continue
        layer = "" if site.layer is None else f"decoder.layers.{local[site.layer]}."
        forms.setdefault(layer + site.op.megatron, set()).add(site.op.form)
    return forms


def _heads(trainer: Trainer) -> set[str]:
    """The products outside the layers."""
    sites = trainer.definition.forward.sites()
    return {site.op.megatron for site in sites if site.layer is None and site.op.form is LINEAR}


def _part(forms: set[OpForm], has_kinds: bool, is_head: bool) -> Part | None:
    parts = {form.part for form in forms}
    if is_head:
        return "head"
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
    """Yield what is held after a backward: weights, what products have made of them, and gradients."""
    from fp8rl.trainer.inventory import inventory

    for each in inventory(trainer):
        part = sites.parameters.get(each.name)
        if part is not None:  # not padding
            keys = {"parameters": _WEIGHTS[part], "operands": "product.cached", "gradients": "gradient.buffer"}
            if key := keys.get(each.kind):
                yield Observation(key, each.name, each.format, plan[key].formats, bytes=each.bytes)


def held_by_optimizer(trainer: Trainer, sites: Sites, plan: Mapping[str, Planned]) -> Iterator[Observation]:
    """Yield what the optimizer holds after an update, judged by value: before it, masters are what a checkpoint holds.

    A master whose moments are zero was never updated, and is taken for what its dtype says.
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
