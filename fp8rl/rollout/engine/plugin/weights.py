"""Keeps the weights of an engine: for each parameter its names in the HF checkpoint, its operand and its digests.

Only `commit` sets the version of the weights. It takes the digests of every parameter that was written, and makes its
operand again. `prepare` does this early for parameters that arrive before the others. Between an update and its commit
the weights have no version, and no forward pass can run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl.models import Model
from fp8rl.models.shared_base import SharedBase
from fp8rl.models.tensors import SCALE_SUFFIX, WHOLE, EngineRank, base_name
from fp8rl.numerics import delta, ops
from fp8rl.numerics.core.memory import copy_all, own_memory, tensors_in
from fp8rl.numerics.digest import stack_digests
from fp8rl.numerics.ops import LowRank
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from fp8rl.numerics.weight_cache import Frozen
from fp8rl.rollout.engine.plugin.parameters import AdaptedRows, CopiesOfKvB, attach_adapters, check_table, copies_in
from fp8rl.rollout.engine.protocol import ADAPTER_SCALE, DELTA


@dataclasses.dataclass(eq=False)
class HeldParameter:
    """One parameter of the engine's model, with its operand and its digests."""

    names: set[str] = dataclasses.field(default_factory=set)
    """Names of the checkpoint's tensors in the parameter and in its scales."""
    mapped: bool = False
    """Whether the parameter is in the shared base. Other processes read it too, so the engine does not write to it."""
    kept: bool = False
    """Whether its operand stays in use although an update runs, which has sent no part of it: a sync of adapters."""
    arrived: set[str] = dataclasses.field(default_factory=set)
    """The `names` that were sent since the operand and the digests were last made."""
    operand: Any = None
    """The operand of an FP8 parameter (`ops.weight_operand`). While an update writes the parameter, the operand is not
    used, but its memory is kept for the next operand."""
    version: str | None = None
    """The version of the weights from which the operand was made. None: it is not the current version."""
    digests: dict[str, str] | None = None
    """Digests by label, taken when the operand was made (`prepare`). None: the parameter was written since then."""

    def reset(self) -> None:
        """Forget the digests, and that the operand stays in use."""
        self.kept, self.digests = False, None


class ServedWeights:
    """The weights of the engine's model, with one version for all of them."""

    def __init__(
        self,
        spec: TensorSpec,
        model: nn.Module,
        definition: Model,
        version: str,
        rank: EngineRank = WHOLE,
        of_base: Collection[str] = (),
        adapted_rows: AdaptedRows | None = None,
    ) -> None:
        """Take over the weights of a model that SGLang has just loaded, or a rank's part of them, and add adapters.

        of_base: names of the parameters in the shared base. If there are any, no parameter has memory yet: parameters
        of the base get it in `map_base`, all others here. adapted_rows: marks the rows that use adapters. None: all do.

        Raises `RuntimeError` if the model has other parameters than its table lists.
        """
        for name, parameter in model.named_parameters() if of_base else ():
            if name not in of_base:
                own_memory(parameter)
        self._adapters = attach_adapters(model, definition, rank) if definition.adapter else {}
        check_table(model, definition)
        self._spec, self._model, self.definition = spec, model, definition
        self.rank, self.adapted_rows = rank, adapted_rows
        self.version: str | None = None
        self.moved = False
        """True if the parameters have other addresses than when CUDA graphs were captured."""
        self._released = False
        self._copies: Mapping[Tensor, CopiesOfKvB] = copies_in(model)
        named: dict[str, Tensor] = dict(model.named_parameters())
        self._held = {parameter: HeldParameter(mapped=name in of_base) for name, parameter in named.items()}
        self.views: dict[Tensor, dict[tuple[str, ...], Tensor]] = {}
        """The tensors of the checkpoint in each parameter: stacks [n, ...], by the labels of their n tensors."""
        self._places: dict[str, tuple[Tensor, int]] = {}
        """The stack that has a tensor, and the tensor's place in it, by label."""
        self._storages: dict[Tensor, int] = {}
        self._find_views()
        for parameter, views in self.views.items():
            self._held[parameter].names = {base_name(label)[0] for labels in views for label in labels}
        for parameter, scale_inv in quantized_parameters(model):
            self._held[parameter].names |= self._held[scale_inv].names
        self._holders: dict[str, list[HeldParameter]] = {}
        for held in self._held.values():
            for name in held.names:
                self._holders.setdefault(name, []).append(held)
        self.commit(version)

    @property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    def map_base(self, base: SharedBase) -> None:
        """Let this engine's parameters read the shared base. The engine does not write to it. Nothing may be computed
        until `commit`. Raises RuntimeError: the engine has several ranks, each with only a part of the weights, or the
        base has other parameters than the engine."""
        if self.rank.ranks > 1:
            raise RuntimeError(
                "fp8rl plugin: found a shared base for an engine of several ranks, expected one rank. Send the weights"
            )
        parameters = dict(self._model.named_parameters())
        found = {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in parameters.items()}
        wrong = [
            f"{name}: found {tuple(view.shape)} in {view.dtype}, expected "
            + ("none" if name not in parameters else "{} in {}".format(*found[name]))
            for name, view in base.parameters.items()
            if found.get(name) != (tuple(view.shape), view.dtype)
        ]
        if wrong:
            raise RuntimeError("fp8rl plugin: the base differs from this engine's parameters\n" + "\n".join(wrong[:5]))
        self.invalidate()
        for name, view in base.parameters.items():
            parameters[name].data = view
        self.moved = True
        for held in self._held.values():
            held.reset()
            held.operand = None
            held.arrived.clear()
        for name in base.parameters:
            self._held[parameters[name]].mapped = True
        self._find_views()

    def invalidate(self) -> None:
        """Note that the parameters are being written. Nothing may be computed with them until `commit`."""
        self._check_there()
        self._forget_version()

    def release(self) -> None:
        """Note that the weights' memory is released. Nothing may use them until `occupy`. Then all must be written."""
        self._forget_version()
        for held in self._held.values():
            held.reset()
        self._released = True

    def occupy(self) -> None:
        """Note that the weights have memory again. Its contents are arbitrary."""
        self._released = False

    def _forget_version(self) -> None:
        if self.version is not None:
            self.version = None
            for held in self._held.values():
                # Digests are taken again also for parameters that an update of the adapters does not change.
                held.kept, held.version, held.digests = bool(self._adapters), None, None

    def everything(self) -> Iterator[Tensor]:
        """Yield all parameters with their operands, except parameters in the shared base."""
        for parameter in self._model.parameters():
            if not self._held[parameter].mapped:
                yield parameter
                yield from tensors_in(self._held[parameter].operand)

    def check(self) -> None:
        """Raise `RuntimeError` between an update and its commit."""
        if self.version is None:
            raise RuntimeError(
                "fp8rl plugin: found weights without a version before a forward pass, expected the last update to be "
                "committed. Replace this engine"
            )

    def operand(self, parameter: nn.Parameter) -> Any:
        """Return the operand of an FP8 parameter [N, K] or [experts, N, K] at the current version.

        Raises `RuntimeError` if the parameter has no operand of this version.
        """
        held = self._held[parameter]
        if held.version is None or held.version != self.version:
            raise RuntimeError(
                f"fp8rl plugin: found an operand of version {held.version} in a forward pass, expected version "
                f"{self.version}: an update was not committed. Replace this engine"
            )
        return held.operand

    def low_rank(self, parameter: Tensor) -> LowRank | None:
        """Return the adapter of a weight in the form that products take. None if the weight has no adapter."""
        if (adapter := self._adapters.get(parameter)) is None or self.adapted_rows is None:
            return adapter and adapter.low_rank
        return dataclasses.replace(adapter.low_rank, rows=self.adapted_rows.mask)

    def prepare(self) -> None:
        """Digest the parameters that have arrived completely, with their scales, and make their operands. The engine
        does this while it waits for more parameters."""
        whole = {parameter for parameter, held in self._held.items() if held.arrived and held.names <= held.arrived}
        if whole:
            self._make_operands(whole)
            for parameter, digests in self._digests(whole).items():
                self._held[parameter].digests = digests
                self._held[parameter].arrived.clear()

    def commit(self, version: str) -> dict[str, str]:
        """Refresh everything derived from the parameters, set the version, and return the manifest.

        The manifest maps the HF name of each tensor to `digest` or, if the tensor is quantized, to `digest@version`,
        where `version` is the version of the operand in use. In an engine with adapters, a parameter that was not sent
        keeps its operand. Its digest is taken again, to show that the parameter has not changed.
        """
        self._check_there()
        self._find_views()
        made = self._make_operands({p for p, held in self._held.items() if not held.kept and held.digests is None})
        for derived in (*self._adapters.values(), *self._copies.values()):
            derived.refresh()
        digests = {parameter: held.digests for parameter, held in self._held.items() if held.digests is not None}
        digests |= self._digests(self._held.keys() - digests.keys())
        for parameter, held in self._held.items():
            if held.operand is not None and (parameter in made or held.kept or held.digests is not None):
                held.version = version
            held.reset()
            held.arrived.clear()
        self.version = version
        return self._entries(digests)

    def manifest(self) -> dict[str, str]:
        """Return the manifest of the parameters as they are now, in the form of `commit`."""
        self._check_there()
        self._find_views()
        return self._entries(self._digests(self._held.keys()))

    def _digests(self, parameters: Set[Tensor]) -> dict[Tensor, dict[str, str]]:
        """Return for each of these parameters the digests of its tensors, by label."""
        within = {parameter: self.views.get(parameter, {}) for parameter in parameters}
        found = iter(stack_digests([stack for views in within.values() for stack in views.values()]))
        return {parameter: dict(zip(chain.from_iterable(views), found)) for parameter, views in within.items()}

    def _entries(self, digests: Mapping[Tensor, Mapping[str, str]]) -> dict[str, str]:
        """Return the manifest of these digests, with the version of each operand that has one."""
        entries: dict[str, str] = {}
        for parameter, its_digests in digests.items():
            of_version = "" if (version := self._held[parameter].version) is None else f"@{version}"
            if parameter in self._copies and not self._copies[parameter].agree(self._spec):
                of_version += "@copies of another"
            entries |= {label: digest + of_version for label, digest in its_digests.items()}
        if scales := {adapter.low_rank.scale for adapter in self._adapters.values()}:
            entries[ADAPTER_SCALE] = " and ".join(map(repr, sorted(scales)))
        return entries

    def _find_views(self) -> None:
        """Find each tensor of the checkpoint in its parameter, unless all parameters have the memory that they had.
        If not, what was prepared no longer counts."""
        storages = {each: each.untyped_storage()._cdata for each in self._model.parameters()}
        if storages == self._storages:
            return
        self._storages, self._places, self.views = storages, {}, {}
        parameters = dict(self._model.named_parameters())  # a tied parameter once
        for labels, parameter, stack in self.definition.tensors.stacks(parameters, self._spec.block_rows, self.rank):
            self.views.setdefault(parameter, {})[labels] = stack
            self._places |= {label: (stack, place) for place, label in enumerate(labels)}
        for held in self._held.values():
            held.reset()

    def operands(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield (the engine's name, the tensors of the operand) for each FP8 parameter."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._model.named_parameters()}
        for parameter, held in self._held.items():
            if held.operand is not None:
                yield names[parameter], list(tensors_in(held.operand))

    def load(self, original: Callable[[Iterable[tuple[str, Tensor]]], object], weights: Iterable[Any]) -> None:
        """Load tensors of the checkpoint, stacks, and deltas. Replaces the model's `load_weights`, which is `original`.

        Tensors are copied into their parameters, many in one launch. Tensors of other ranks are left out. SGLang's own
        loader compares each name with the names of all experts, and drops a tensor that arrives without its partner,
        without a message. So this loader gets only names that the table does not have.
        """
        table, unknown = self.definition.tensors, []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, tensor in weights:
            if (label := name.removeprefix(DELTA)) != name:
                if label in self._places:
                    self._note_arrival([base_name(label)[0]])
                    stack, place = self._places[label]
                    delta.apply(tensor, stack[place])
            elif (row := table.get(name)) is None:
                unknown.append((name, tensor))
            else:
                names, stack = table.stack(name, tensor)
                part = tensor if stack is tensor else self.rank.part(row, tensor)[None]
                here = [n for n, each in enumerate(names) if self.rank.label(each, row) in self._places]
                if not here:
                    continue
                first, end = here[0], here[-1] + 1
                self._note_arrival(names[first:end])
                target, place = self._places[self.rank.label(names[first], row)]
                if (shape := tuple(part.shape[1:])) != (expected := tuple(target.shape[1:])):
                    raise RuntimeError(
                        f"fp8rl plugin: found {name} of shape {shape}, expected {expected}, its shape in this engine. "
                        "Replace this engine"
                    )
                targets.append(target[place : place + len(here)])
                sources.append(part[first:end])
        copy_all(targets, sources)
        if unknown:
            original(unknown)

    def _note_arrival(self, names: Sequence[str]) -> None:
        """Note that tensors of one parameter, or parts of them, are being written. names: in the checkpoint."""
        for held in self._holders[names[0]]:
            if held.mapped:
                raise RuntimeError(
                    f"fp8rl plugin: found {names[0]} sent to an engine that reads it from a base, expected only "
                    "tensors that are not in the base, because an engine must not write to it. Replace this engine"
                )
            held.arrived.update(names)
            held.reset()

    def _check_there(self) -> None:
        if self._released:
            raise RuntimeError(
                "fp8rl plugin: found weights whose memory was released, expected it to be allocated again first. Wake "
                "this engine (/resume_memory_occupation)"
            )

    def _make_operands(self, parameters: Set[Tensor]) -> set[Tensor]:
        """Make operands, without a version yet, for parameters that are quantized. Return these parameters."""
        made = set()
        for parameter, scale_inv in quantized_parameters(self._model):
            if parameter in parameters:
                held, scales = self._held[parameter], scale_inv.detach().to(self._spec.scale_dtype)
                quantized = QuantizedTensor(parameter.detach(), scales, self._spec)
                held.operand = Frozen(quantized) if held.mapped else ops.weight_operand(quantized, held.operand)
                made.add(parameter)
        return made


def quantized_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Return each quantized parameter with its scales."""
    parameters = dict(model.named_parameters())
    return ((p, parameters[name + SCALE_SUFFIX]) for name, p in parameters.items() if name + SCALE_SUFFIX in parameters)
