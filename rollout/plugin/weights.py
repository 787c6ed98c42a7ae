"""The engine's own weights: what each parameter is called in the HF checkpoint, what it multiplies as, its digest.

`commit` is the one place where the version is set. By then every parameter has been digested since it was last written,
and the operands of the products are made anew: some by `prepare`, while the rest of the weights is still on its way.
Between an update and its commit the weights have no version and no forward runs on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl.models import Model
from fp8rl.models.base import Base
from fp8rl.models.tensors import WHOLE, EngineRank, base_name
from fp8rl.numerics import delta, ops
from fp8rl.numerics.core.memory import own_memory, tensors_in
from fp8rl.numerics.digest import tensor_digests
from fp8rl.numerics.frozen import Frozen
from fp8rl.numerics.ops import LowRank
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from fp8rl.rollout.plugin import adapters
from fp8rl.rollout.plugin.adapters import AdaptedRows, Adapter
from fp8rl.rollout.plugin.families import Copies, families
from fp8rl.rollout.plugin.held import Served, check_table, hf_tensors, quantized_parameters
from fp8rl.rollout.protocol import ADAPTER_SCALE, DELTA


@dataclasses.dataclass(frozen=True)
class Operand:
    """The operand of one FP8 parameter (`ops.weight_operand`), and the weight version it was made from; None: none
    that is whole, its memory waits for the next."""

    value: Any
    version: str | None


class ServedWeights:
    """The weights of the engine's model under an explicit version."""

    def __init__(self, spec: TensorSpec) -> None:
        self.version: str | None = None
        self.adapted_rows: AdaptedRows | None = None
        self.rank = WHOLE
        self._released = False
        self._spec = spec
        self._attached: tuple[nn.Module, Model] | None = None
        self._operands: dict[Tensor, Operand] = {}
        self._places: dict[str, Tensor] = {}
        self._names: dict[Tensor, set[str]] = {}
        self._mapped: frozenset[Tensor] = frozenset()
        self._arrived: set[str] = set()
        self._made: set[Tensor] = set()
        self._stays: set[Tensor] = set()
        self._adapters: dict[Tensor, Adapter] = {}
        self._copies: dict[Tensor, Copies] = {}
        self._digested: dict[Tensor, dict[str, str]] = {}

    @property
    def device(self) -> torch.device:
        return next(self._loaded()[0].parameters()).device

    @property
    def definition(self) -> Model:
        """Return what is known of the model beside its weights."""
        return self._loaded()[1]

    def attach(
        self,
        model: nn.Module,
        definition: Model,
        version: str,
        rank: EngineRank = WHOLE,
        of_base: Collection[str] = (),
        adapted_rows: AdaptedRows | None = None,
    ) -> None:
        """Take charge of a model that has just been loaded, whole or the part of a rank. Adapters that its definition
        has are put beside its weights. adapted_rows: which rows have them; None: all.

        of_base: parameters that are placeholders until a base is mapped; if there are such, then so are all others,
        which get memory.
        Raises `RuntimeError` if it is not as its table says.
        """
        held = dict(model.named_parameters())
        self._mapped = frozenset(parameter for name, parameter in held.items() if name in of_base)
        for parameter in held.values() if of_base else ():
            if parameter not in self._mapped:
                own_memory(parameter)
        self._adapters = adapters.attach(model, definition, rank) if definition.adapter else {}
        check_table(model, definition)
        self._attached, self.rank, self.adapted_rows = (model, definition), rank, adapted_rows
        self._copies = {weight: held for family in families() for weight, held in family.copies(model).items()}
        self._operands.clear()
        self._places.clear()
        self._names.clear()
        for label, parameter, _ in self.tensors():
            self._names.setdefault(parameter, set()).add(base_name(label)[0])
        for parameter, scale_inv in quantized_parameters(model):
            self._names[parameter] |= self._names[scale_inv]
        self.commit(version)

    def map_base(self, base: Base) -> None:
        """Have the parameters be those of a base, which this engine shares with others and does not write. Nothing may
        be computed with them until `commit`.

        Raises:
            RuntimeError: a rank of several holds parts alone; or the base has not this engine's parameters.
        """
        if self.rank.ranks > 1:
            raise RuntimeError(
                "fp8rl plugin: found a base for a rank of several, expected it for a whole engine; send the weights"
            )
        held = dict(self._loaded()[0].named_parameters())
        wrong = [
            f"{name}: found {tuple(view.shape)} in {view.dtype}, expected {_said(held.get(name))}"
            for name, view in base.parameters.items()
            if name not in held or (held[name].shape, held[name].dtype) != (view.shape, view.dtype)
        ]
        if wrong:
            raise RuntimeError("fp8rl plugin: a base is not of this engine's parameters\n" + "\n".join(wrong[:5]))
        self.invalidate()
        for former in self._operands:
            self._operands[former] = Operand(None, None)
        for name, view in base.parameters.items():
            held[name].data = view
        self._mapped = frozenset(held[name] for name in base.parameters)
        for stale in (self._places, self._arrived, self._made, self._stays, self._digested):
            stale.clear()

    def invalidate(self) -> None:
        """The parameters are being written: nothing may be computed with them until `commit`."""
        self._check_there()
        self._forget_version()

    def release(self) -> None:
        """Their memory goes: nothing may be read or written until `occupy`, and then all has to be written."""
        self._forget_version()
        self._stays.clear()
        self._released = True

    def occupy(self) -> None:
        """There is memory for them again, with nothing in it."""
        self._released = False

    def everything(self) -> Iterator[Tensor]:
        """All parameters, and what is made of them, but for those of a base: it is not this engine's."""
        yield from (each for each in self._loaded()[0].parameters() if each not in self._mapped)
        for parameter, held in self._operands.items():
            if parameter not in self._mapped:
                yield from tensors_in(held.value)

    def _forget_version(self) -> None:
        if self.version is not None:
            self._made.clear()
            self._digested.clear()
            # A sync of adapters alone leaves the others as they are. Their digests are taken anew all the same.
            self._stays = set(self._operands) if self._adapters else set()
        self.version = None
        self._operands = {parameter: Operand(held.value, None) for parameter, held in self._operands.items()}

    def check(self) -> None:
        """Raises `RuntimeError` between an update and its commit."""
        if self.version is None:
            raise RuntimeError(
                "fp8rl plugin: found weights without a version before a forward, expected an update to be committed "
                "first; replace this engine"
            )

    def operand(self, parameter: nn.Parameter) -> Any:
        """Return what an FP8 parameter [N, K], or [experts, N, K], multiplies as at the current version.

        Raises `RuntimeError` if there is none of that version.
        """
        entry = self._operands.get(parameter)
        if entry is None or entry.version is None or entry.version != self.version:
            found = entry.version if entry is not None else None
            raise RuntimeError(
                f"fp8rl plugin: a forward asked for weights of version {self.version}, and this parameter's "
                f"operand is of version {found}. An update was not committed; replace this engine"
            )
        return entry.value

    def low_rank(self, parameter: Tensor) -> LowRank | None:
        """Return what a product with this weight adds; None if it has no adapter."""
        if (adapter := self._adapters.get(parameter)) is None or self.adapted_rows is None:
            return adapter and adapter.low_rank
        return dataclasses.replace(adapter.low_rank, rows=self.adapted_rows.mask)

    def prepare(self) -> None:
        """Digest the parameters that have arrived whole, with their scales, and make their operands, while the engine
        waits for the others."""
        if self._arrived:
            whole = {parameter for parameter, names in self._names.items() if names <= self._arrived}
            if whole:
                self._forget_written()
                self._arrived.difference_update(*(self._names[parameter] for parameter in whole))
                self._refresh(whole)
                self._digested |= self._digests(whole)

    def commit(self, version: str) -> dict[str, str]:
        """Refresh everything derived from the parameters, set the version, and return the manifest.

        The manifest gives, for each tensor by its HF name, `digest` for what is served as it is, and `digest@version`
        for what is quantized, where `version` is that of the operand in use. With adapters, what is not written stays
        in use: that it has not changed is what its digest, taken anew, says.
        """
        self._check_there()
        self._forget_written()
        self._arrived.clear()
        quantized = {parameter for parameter, _ in quantized_parameters(self._loaded()[0])}
        self._refresh(quantized - self._made - self._stays)
        for derived in (*self._adapters.values(), *self._copies.values()):
            derived.refresh()
        self._operands |= {each: Operand(self._operands[each].value, version) for each in self._made | self._stays}
        digests = self._digested | self._digests(self._names.keys() - self._digested.keys())
        self._made.clear()
        self._digested.clear()
        self.version = version
        return self._entries(digests)

    def manifest(self) -> dict[str, str]:
        """`commit`'s manifest, taken anew from the parameters as they are now."""
        self._check_there()
        return self._entries(self._digests(self._names.keys()))

    def _forget_written(self) -> None:
        """Forget what was prepared of a parameter once a part of it has come again."""
        written = {parameter for parameter, names in self._names.items() if names & self._arrived}
        self._made -= written
        self._stays -= written
        self._digested = {each: digests for each, digests in self._digested.items() if each not in written}

    def _digests(self, parameters: Set[Tensor]) -> dict[Tensor, dict[str, str]]:
        """The digest of each tensor in these parameters, by its label."""
        chosen = list(self.tensors(parameters))
        found: dict[Tensor, dict[str, str]] = {}
        for (label, parameter, _), digest in zip(chosen, tensor_digests([view for _, _, view in chosen]), strict=True):
            found.setdefault(parameter, {})[label] = digest
        return found

    def _entries(self, digests: Mapping[Tensor, Mapping[str, str]]) -> dict[str, str]:
        """The manifest of these digests, with the version of each operand that has one."""
        entries: dict[str, str] = {}
        for parameter, its_digests in digests.items():
            operand = self._operands.get(parameter)
            of_version = "" if operand is None or operand.version is None else f"@{operand.version}"
            if parameter in self._copies and not self._copies[parameter].agree(self._spec):
                of_version += "@copies of another"
            entries |= {label: digest + of_version for label, digest in its_digests.items()}
        if scales := {adapter.low_rank.scale for adapter in self._adapters.values()}:
            entries[ADAPTER_SCALE] = " and ".join(map(repr, sorted(scales)))
        return entries

    def tensors(self, within: Set[Tensor] | None = None) -> Iterator[Served]:
        """Return what this rank has of the checkpoint, as it is held; within: in these parameters alone."""
        model, definition = self._loaded()
        return hf_tensors(model, definition.tensors, self._spec.block_rows, self.rank, within)

    def operands(self) -> Iterator[tuple[str, list[Tensor]]]:
        """The engine's name of each FP8 parameter, and the tensors of which its operand is made."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._loaded()[0].named_parameters()}
        return ((names[parameter], list(tensors_in(held.value))) for parameter, held in self._operands.items())

    def load(self, original: Callable[[Iterable[tuple[str, Tensor]]], object], weights: Iterable[Any]) -> None:
        """Load tensors of the checkpoint, and deltas: stands in place of the model's `load_weights`, here `original`.

        A delta of what another rank holds is none of this one's. What SGLang would drop without a word if its partner
        is not in the same message (`Location.together`) is put where it belongs.
        """
        table = self.definition.tensors
        whole, of_base = [], set().union(*(self._names[parameter] for parameter in self._mapped))
        for name, tensor in weights:
            tensor_name = base_name(name.removeprefix(DELTA))[0]
            if tensor_name in of_base:
                raise RuntimeError(
                    f"fp8rl plugin: found {tensor_name} sent to an engine that reads it from a base, and must not "
                    "write it, expected what is not in the base; replace this engine"
                )
            self._arrived.add(tensor_name)
            if name in self._held_as() and table[name].engine.together:
                self._held_as()[name].copy_(tensor)
            elif self._load_adapter(name, tensor):
                continue
            elif not name.startswith(DELTA):
                whole.append((name, tensor))
            elif (held := self._held_as().get(name.removeprefix(DELTA))) is not None:
                delta.apply(tensor, held)
        if whole:
            original(whole)

    def _load_adapter(self, name: str, tensor: Tensor) -> bool:
        """Take a tensor if it is an adapter's, of which another rank may hold all; whether it is."""
        row = self.definition.tensors.rows.get(name)
        if row is None or row.adapts is None:
            return False
        if (held := self._held_as().get(self.rank.label(name, row))) is not None:
            held.copy_(self.rank.part(row, tensor))
        return True

    def _check_there(self) -> None:
        if self._released:
            raise RuntimeError(
                "fp8rl plugin: found weights whose memory was released, expected it to be taken back first; wake this "
                "engine (/resume_memory_occupation)"
            )

    def _refresh(self, parameters: Set[Tensor]) -> None:
        """Make the operands of these anew; they have no version yet."""
        for parameter, scale_inv in quantized_parameters(self._loaded()[0]):
            if parameter in parameters:
                scales = scale_inv.detach().to(self._spec.scale_dtype)
                quantized = QuantizedTensor(parameter.detach(), scales, self._spec)
                self._operands[parameter] = Operand(self._operand_of(parameter, quantized), None)
                self._made.add(parameter)

    def _operand_of(self, parameter: Tensor, quantized: QuantizedTensor) -> Any:
        if parameter in self._mapped:
            return Frozen(quantized)
        former = self._operands.get(parameter)
        return ops.weight_operand(quantized, former.value if former else None)

    def _held_as(self) -> dict[str, Tensor]:
        """Return where each tensor is, by its label."""
        if not self._places:
            self._places = {label: view for label, _, view in self.tensors()}
        return self._places

    def _loaded(self) -> tuple[nn.Module, Model]:
        if self._attached is None:
            raise RuntimeError("fp8rl plugin: no model is loaded yet")
        return self._attached


def _said(parameter: Tensor | None) -> str:
    return "none" if parameter is None else f"{tuple(parameter.shape)} in {parameter.dtype}"
