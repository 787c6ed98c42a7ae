"""Shows a watcher all ops of the trainer's forward pass at their places, and records them (`models.program`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.models.program import (
    CHOSEN,
    LENGTHS,
    LOGITS,
    PROGRAM,
    TARGETS,
    TEMPERATURE,
    TOKENS,
    OpSite,
    Trace,
    constants,
    run,
)
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics import ops
from fp8rl.numerics.backend import dispatch
from fp8rl.trainer import device
from fp8rl.trainer.modules.exact import Normed
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.trainer import Trainer


@torch.no_grad()
def trace_ops(trainer: Trainer, batch: TokenBatch) -> dict[str, Tensor]:
    """Run a forward pass for each sequence of `batch`, and record every op. trainer: in exact mode, whose layers run a
    program, and of one rank, because with several no rank sees a whole op."""
    trace, here, (*_, loss) = _Trace(trainer.definition.sizes), device.current(), trainer.definition.forward.sites()
    rows = [row[:n] for row, n in zip(batch.tokens, batch.lengths.tolist(), strict=True)]
    targets = [F.pad(row[1:], (0, 1)) for row in rows]
    with placed(trainer), dispatch.watched(trace):
        for tokens, following in zip(rows, targets, strict=True):
            logits = trainer.model(tokens[None].to(here), position_ids=None, attention_mask=None)[0]
            host: Any = _Loss(following.to(here), batch.temperature)
            run([loss], host, {LOGITS: logits})
    recording = trace.recording() | {TOKENS: torch.cat(rows), TARGETS: torch.cat(targets), LENGTHS: batch.lengths}
    scalars = {TEMPERATURE: batch.temperature} | constants(trainer.model.decoder.layers[0].sizes)
    return recording | {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}


class _Trace(Trace):
    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self._sizes = sizes

    def in_recording(self, site: OpSite, name: str, value: Any) -> Tensor:
        """[S, 1, ...] -> [S, ...], with the channels of all heads' first parts first. Experts' ids are int32."""
        if isinstance(value, Normed):
            value = ops.rms_norm(value.x, value.weight, value.eps)
        value = value.flatten(0, 1) if value.dim() > 2 else value.int() if name == CHOSEN else value
        if (channels := site.op.form.channels) is None or name != site.op.writes[0]:
            return value  # type: ignore[no-any-return]
        widths = channels(self._sizes)
        return torch.cat([part.flatten(1) for part in value.unflatten(-1, (-1, sum(widths))).split(widths, -1)], 1)


@dataclass(frozen=True)
class _Loss:
    """The host of the last op, which Megatron's model leaves to the loss."""

    targets: Tensor
    temperature: float

    def logprobs(self, site: OpSite, logits: Tensor) -> Tensor:
        return ops.token_logprobs(logits, self.targets, self.temperature)[0]


@contextmanager
def placed(trainer: Trainer) -> Iterator[None]:
    """Tell the dispatcher which op a Megatron module computes, outside the layers and in native mode's layers, and show
    the ops outside the layers. In exact mode the layers' program does both."""
    rows = trainer.definition.tensors.in_layer
    layers = {layer.layer_number - 1: f"decoder.layers.{at}." for at, layer in enumerate(trainer.model.decoder.layers)}
    exact, modules = trainer.numerics.mode == "exact", dict(trainer.model.named_modules())
    sites: dict[str, OpSite] = {}
    for site in trainer.definition.forward.sites():
        outside = site.layer is None
        if site.op.megatron and (outside or (not exact and site.layer in layers)):
            path = ("" if outside else layers[site.layer]) + site.op.megatron  # type: ignore[index]
            has_product = any(row.op == site.op.name and row.product for row in rows.get(site.layer, ()))
            if path in modules and (has_product or path not in sites):  # of a norm and the product behind it
                sites[path] = site
    outer: list[Any] = []

    def enter(site: OpSite, *_: Any) -> None:
        outer.append(dispatch.place)
        dispatch.place = site

    def leave(_: Any, given: tuple[Any, ...], out: Any) -> None:
        site: OpSite = dispatch.place
        if site.layer is None and out is not None:  # a norm's sum is what it was given
            made = [out[0] if isinstance(out, tuple) else out, *given[: len(site.op.writes) - 1]]
            dispatch.note(PROGRAM, (None, given, made))
        dispatch.place = outer.pop()

    with ExitStack() as undo:
        for path, site in sites.items():
            undo.callback(modules[path].register_forward_pre_hook(partial(enter, site)).remove)
            undo.callback(modules[path].register_forward_hook(leave, always_call=True).remove)
        yield
