"""The engine's side of the families of ops (`models.families`), a file for each of the same name.

A file says what is hooked in SGLang, how SGLang's modules are called on given inputs, and what SGLang derives from
weights. There is no list of families: the engine takes every file here, and each family that other code gives to
`register_family`, as the module that defines an architecture in SGLang may.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp8rl.models.program import Forward, OpForm
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import TensorSpec

Read = Sequence[Tensor | None]
OF_ITS_SCHEDULER = (
    "the attention of SGLang's GPU backends runs on the batches of its scheduler only: found native mode on a GPU, "
    "expected exact mode or a CPU. Ask without the comparison op by op"
)


@dataclasses.dataclass(frozen=True)
class Hook:
    """One function of SGLang that the plugin changes."""

    target: str
    """Dotted name under `sglang.srt`, or `kernels...` under `sglang`."""
    kind: str
    """SGLang's `HookType`: replace, around, before, after."""
    function: Callable[..., Any]
    parameters: str
    """Names of the target's parameters, in order, without `self`."""
    provides: tuple[Callable[..., Any], ...] = ()
    """Ops of `numerics.ops` that the hook computes by their definition."""

    @property
    def path(self) -> str:
        return f"sglang.{self.target}" if self.target.startswith("kernels.") else f"sglang.srt.{self.target}"


def nothing(*_: Any, **__: Any) -> None:
    """Leave out what SGLang does at a hook."""


@dataclasses.dataclass(frozen=True)
class Probed:
    """An engine whose ops are run on the tokens of some sequences, end to end."""

    runner: Any
    """SGLang's ModelRunner."""
    sizes: ModelSizes
    lengths: Tensor
    """int64 [sequences]"""
    targets: Tensor
    """int64 [T], the tokens whose log-probabilities are computed."""
    temperature: float

    @cached_property
    def positions(self) -> Tensor:
        """int64 [T]"""
        return torch.cat([torch.arange(n, device=self.lengths.device) for n in self.lengths.tolist()])


@dataclasses.dataclass(frozen=True)
class EngineSide:
    """One form of op in the engine."""

    run: Callable[..., tuple[Tensor, ...]]
    """Returns the op's outputs, given the engine, SGLang's module of the op, and the op's inputs."""
    each: Callable[..., Tensor] | None = None
    """[T, k, H], what each of a token's experts adds to the output; None where there are no experts."""
    constants: Callable[[Any], tuple[float, ...]] | None = None
    """Returns the values of the form's constants in a module."""
    hooked: bool = True
    """True: in exact mode a hook puts the form's definition into SGLang. False: SGLang's model calls the definition."""


class Copies(Protocol):
    """Tensors that SGLang makes of one weight, and multiplies by in its place."""

    def refresh(self) -> None:
        """Make the copies anew."""

    def agree(self, spec: TensorSpec) -> bool:
        """Return whether the copies equal the weight bit for bit (dequantized, if it is quantized by `spec`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFamily:
    """One family of ops in the engine."""

    sides: Mapping[OpForm, EngineSide]
    """The engine's side of each form of the family."""
    hooks: Callable[[NumericsConfig, bool], tuple[Hook, ...]] = lambda numerics, cuda: ()
    """Returns the hooks for these numerics, on a GPU (True) or a CPU."""
    copies: Callable[[nn.Module], Mapping[Tensor, Copies]] = lambda model: {}
    """Returns the copies that SGLang's model has of its weights, by weight."""
    caches: Callable[[Any], Iterable[tuple[str, Tensor]]] = lambda runner: ()
    """Returns the caches that a ModelRunner of SGLang has besides its pool of keys and values, by name."""
    states: Callable[[Any], Iterable[tuple[str, Tensor]]] = lambda runner: ()
    """Returns the states (FP32) to which a ModelRunner adds with each token of a sequence, by name."""


_registered: list[EngineFamily] = []


def register_family(family: EngineFamily) -> None:
    """Make a family known in this process. The families of this package are known without a call."""
    if family not in _registered:
        _registered.append(family)


def families() -> list[EngineFamily]:
    """Return all known families."""
    ours = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [*(import_module(f"{__name__}.{name}").FAMILY for name in ours), *_registered]


def sides() -> dict[OpForm, EngineSide]:
    """Return the engine's side of every form."""
    return {form: side for family in families() for form, side in family.sides.items()}


def check_forms(forward: Forward, provided: tuple[str, ...]) -> None:
    """Check that every op of a model can be probed and, where hooks are to provide its definition, that one does.

    provided: names of the forms whose definition a hook puts in place of SGLang's own.

    Raises:
        RuntimeError: an op fails the check. The message names the forms.
    """
    found, known = {site.op.form for site in forward.sites()}, sides()
    unknown = sorted(form.name for form in found - known.keys())
    needed = {form for form in found & known.keys() if form.definition is not None and known[form].hooked}
    stock = sorted(form.name for form in needed if form.name not in provided)
    if unknown or stock:
        raise RuntimeError(
            f"fp8rl plugin: found ops of forms without an engine side {unknown}, and of forms that no hook computes by "
            f"their definition {stock}, expected neither in exact mode. Register a family "
            "(rollout.engine.plugin.families.EngineFamily) with a side of the first, where the architecture's model is "
            "defined, and a hook that provides the second"
        )
