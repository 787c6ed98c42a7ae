"""Syncs of adapters alone, and the proof that the weights beside them, on both sides, stay as they are.

Each side digests its own weights in every sync, where they lie: the trainer its frozen parameters, an engine what it
serves. Neither is sent or quantized again. A digest reads memory once, at its full speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.core.process import rank
from fp8rl.numerics.digest import tensor_digests
from fp8rl.numerics.frozen import frozen_of
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.protocol import ADAPTER_SCALE
from fp8rl.weight_sync.manifest import Sent, SyncError, some_of
from fp8rl.weight_sync.quantized import would_send

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

Contents = Literal["weights", "adapters", "weights and adapters", "adapters beside a base"]
"""The part of the model that a sync sends. `weights`: those that are served, with adapters merged into them if there
are any. `adapters beside a base`: with those weights that are not in the memory that engines read with the trainer
(`weight_sync.base`)."""
_NAMED = 20


@dataclass
class HeldBase:
    """The frozen weights that engines hold beside adapters."""

    sent: Sent | None = None
    """Their digests, from the first sync on."""
    version: int | None = None
    """The weight version that all engines hold which were sent it; None: unknown."""

    def contents(self, held: int | None) -> Contents:
        """Choose what to send to engines that all hold version `held`; None: they do not hold one."""
        known = self.sent is not None and held is not None and held == self.version
        return "adapters" if known else "weights and adapters"

    def completed(self, parts: Sequence[Sent], adapter: AdapterSection, contents: Contents) -> list[Sent]:
        """Return what engines must hold after a sync whose ranks have sent these parts: the base too, and the adapters'
        scale.

        Raises:
            SyncError: the trainer has sent a base that is not the one of the first sync.
        """
        scale = scale_of(adapter)
        if contents == "adapters":
            assert self.sent is not None
            return [*parts, self.sent, scale]
        digests = {n: each for part in parts for n, each in part.digests.items() if n not in part.adapters}
        held = sum(part.weight_bytes - part.adapter_bytes for part in parts)
        self.sent = self.sent or Sent(digests, held, 0)
        _compare(self.sent.digests, digests, "what the trainer sends of the weights")
        return [*parts, scale]

    def changed(self, names: Sequence[str]) -> str:
        """Count the base's tensors among these mismatches, for the message of a sync that did not send it; empty:
        none."""
        own = sum(name in self.sent.digests for name in names) if self.sent is not None else 0
        return f" ({own} of the base, which changed in the engine under the run)" if own else ""


def exported(trainer: Trainer, contents: Contents) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
    """Return the (HF name, tensor) pairs of this rank's shard. All ranks must iterate to the end."""
    if contents == "weights":
        return trainer.export_weights()
    adapters = trainer.weights.adapters(trainer.model)
    if contents == "adapters beside a base":
        of_base = trainer.placed.base.tensors
        return itertools.chain((each for each in trainer.export_weights() if each[0] not in of_base), adapters)
    return adapters if contents == "adapters" else itertools.chain(trainer.export_weights(), adapters)


def would_hold(trainer: Trainer, spec: QuantSpec, engine_ranks: int = 1) -> Sent:
    """Return this rank's part of what an engine that serves `spec` must hold of the trainer's model, adapters too."""
    adapter = trainer.definition.adapter
    if adapter is None or adapter.mode == "merged":
        return would_send(trainer.export_weights(), spec, trainer.definition, engine_ranks)
    sent = would_send(exported(trainer, "weights and adapters"), spec, trainer.definition, engine_ranks)
    return replace(sent, digests=sent.digests | scale_of(adapter).digests) if rank() == 0 else sent


def scale_of(adapter: AdapterSection) -> Sent:
    """Return an engine's entry for the scale of its adapters, beside the tensors."""
    return Sent({ADAPTER_SCALE: repr(adapter.scale)}, 0, 0)


def check_frozen(trainer: Trainer) -> None:
    """Check that this rank's frozen parameters have the digests that they had at the first check.

    Raises:
        SyncError: with the names of the parameters.
    """
    frozen: dict[str, Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        if (codes := frozen_of(parameter)) is not None:
            frozen[f"codes of {name}"] = codes.held.data.view(torch.uint8)
            frozen[f"scales of {name}"] = codes.held.scale_inv
        elif not parameter.requires_grad:
            frozen[name] = parameter.detach()
    found = dict(zip(frozen, tensor_digests(list(frozen.values())), strict=True))
    known = trainer.last_sent.frozen
    for name, digest in found.items():
        known.setdefault(name, digest)
    _compare({name: known[name] for name in found}, found, "the trainer's frozen parameters")


def _compare(expected: dict[str, str], found: dict[str, str], what: str) -> None:
    if expected == found:
        return
    names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    lines = (f"{name}: found {found.get(name)}, expected {expected.get(name)}" for name in names[:_NAMED])
    raise SyncError(
        f"the base changed under the run: found {len(names)} of {what} other than in the first sync "
        f"({some_of(names)}), expected all of them as they were, since adapters alone are trained; generation stays "
        "paused.\nRestart the run from its last checkpoint:\n" + "\n".join(lines)
    )
