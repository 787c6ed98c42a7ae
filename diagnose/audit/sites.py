"""The modules of the trainer's model that compute each op of the forward, and the spec's plan for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fp8rl.models.forms import LINEAR, OpForm
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.config import NumericsConfig

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

Part = Literal["embedding", "head", "router", "attention", "product", "experts", "norm"]
"""The kind of a module. A product may have a norm inside, a layer of experts has its products inside."""


_BEFORE_PRODUCTS: tuple[Part, ...] = ("embedding", "router", "attention", "experts")
"""Kinds that a module has whatever else is in it."""


@dataclass(frozen=True)
class Site:
    """One module of the trainer.

    Attributes:
        path: Megatron's, of this rank. quantized: what the spec says of the products in it; both where it says no to
            one and yes to another.
    """

    path: str
    part: Part
    quantized: frozenset[bool] = frozenset({False})


class Sites:
    """The modules of one rank, found by path, its parameters by what they are, and those of them that adapt others."""

    def __init__(self, trainer: Trainer, numerics: NumericsConfig) -> None:
        """numerics: as planned."""
        self._by_path: dict[str, Site] = {}
        self.parameters: dict[str, Part] = {}
        definition, spec = trainer.definition, numerics.trainer_spec
        rows = {name: held[0] for name, held in trainer.weights.rows(trainer.model).items()}
        heads = _heads(trainer)
        for path, seen in _forms(trainer).items():
            inside = [row for name, row in rows.items() if name.startswith(f"{path}.") and row.kind]
            quantized = frozenset(definition.quantizes(row, spec) for row in inside)
            if part := _part(seen, bool(inside), path in heads):
                self._by_path[path] = Site(path, part, quantized or frozenset({False}))
        self.adapters = {name for name, row in rows.items() if row.adapts is not None}
        for name, row in rows.items():
            self.parameters[name] = self._part_of(name, row)

    def at(self, path: str) -> Site | None:
        """The innermost module that is known, of those around a path."""
        while path:
            if path in self._by_path:
                return self._by_path[path]
            path = path.rpartition(".")[0]
        return None

    def exactly(self, path: str) -> Site | None:
        return self._by_path.get(path)

    def _part_of(self, name: str, row: TensorRow) -> Part:
        if row.kind is not None or row.adapts is not None:
            return "product" if row.expert is None else "experts"
        site = self.at(name)
        if not row.product and site is not None and site.part != "embedding":
            return "norm"  # also inside another module
        return site.part if site is not None else "norm"


def _forms(trainer: Trainer) -> Mapping[str, set[OpForm]]:
    """The forms of the ops that each module computes, by its path on this rank."""
    local = {layer.layer_number - 1: index for index, layer in enumerate(trainer.model.decoder.layers)}
    forms: dict[str, set[OpForm]] = {}
    for place in trainer.definition.forward.places():
        if not place.op.megatron or (place.layer is not None and place.layer not in local):
            continue
        layer = "" if place.layer is None else f"decoder.layers.{local[place.layer]}."
        forms.setdefault(layer + place.op.megatron, set()).add(place.op.form)
    return forms


def _heads(trainer: Trainer) -> set[str]:
    """The products outside the layers."""
    places = trainer.definition.forward.places()
    return {place.op.megatron for place in places if place.layer is None and place.op.form is LINEAR}


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
