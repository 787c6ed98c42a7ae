"""Recordings of the inputs and outputs of each op in the trainer's forward pass (`models.trace`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from fp8rl.models import Model
from fp8rl.models.program import LOGPROBS, TOKENS, Forward, OpForm, OpSite
from fp8rl.models.trace import EACH, LENGTHS, TARGETS, OpTrace, recorded
from fp8rl.numerics import ops
from fp8rl.numerics.core.errors import user_error
from fp8rl.trainer import device
from fp8rl.trainer.modules.families import MegatronSide, sides
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.trainer import Trainer

Written = dict[OpSite, tuple[Tensor, ...]]
"""The recorded outputs of each op."""


def trace_ops(trainer: Trainer, batch: TokenBatch) -> OpTrace:
    """Run a forward pass of each sequence of `batch` by itself, and record every op. Raises UserError: the trainer has
    several ranks, so that each sees only a part of an op, or TransformerEngine's layers."""
    if trainer.config.world_size > 1:
        expected = "1: with several, no rank sees a whole op"
        remedy = "Attribute with a trainer of one rank and numerics.k_splits set to the run's trainer.tp."
        raise user_error("trainer", f"{trainer.config.world_size} ranks", expected, remedy)
    if trainer.lowering.transformer_engine:
        expected = "layers of which every op can be seen: TransformerEngine's fuse some"
        remedy = "Attribute with numerics.mode=exact, or on a machine without a GPU."
        raise user_error("numerics.mode", "native, on TransformerEngine", expected, remedy)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for row in range(batch.rows):
        tokens = batch.tokens[row : row + 1, : int(batch.lengths[row])].to(device.current())
        for name, tensor in _trace(trainer.model, trainer.definition, tokens, batch.temperature).items():
            parts[name].append(tensor.cpu())
    tensors = {name: torch.cat(rows).contiguous() for name, rows in parts.items()}
    tensors[LENGTHS] = batch.lengths.cpu().clone()
    constants: dict[str, float] = {}
    known = sides(trainer.definition)
    for at in reversed(trainer.definition.forward.sites()):  # each as the first op with it has it
        if (read := known[at.op.form].constants) is not None:
            values = map(float, read(trainer.model, _module(trainer.model, at)))
            constants |= zip(at.op.form.constants, values, strict=True)
    return OpTrace(tensors, constants)


def _trace(model: GPTModel, definition: Model, tokens: Tensor, temperature: float) -> dict[str, Tensor]:
    """Record one sequence [1, S]."""
    targets, forward, known = F.pad(tokens[0, 1:], (0, 1)), definition.forward, sides(definition)
    with torch.no_grad(), _watched(model, forward, known) as (written, rows):
        model(tokens, position_ids=None, attention_mask=None)
    record, values = {TARGETS: targets}, {TOKENS: tokens[0]}
    for site in forward.sites():
        op = site.op
        if op.form is LOGPROBS:  # after the forward, in the loss
            written[site] = (ops.token_logprobs(values[op.reads[0]], targets, temperature)[0],)
        record |= recorded(site, [values.get(name) for name in op.reads], written[site])
        if (each := known[op.form].each) is not None:
            _, probs, chosen, *_ = (values[name] for name in op.reads)
            record[site.key(EACH)] = each(_module(model, site), probs, chosen, rows[site])
        values |= zip(op.writes, written[site], strict=True)
    return record


@contextmanager
def _watched(
    model: GPTModel, forward: Forward, known: Mapping[OpForm, MegatronSide]
) -> Iterator[tuple[Written, dict[OpSite, Tensor]]]:
    """Record the ops' outputs, tensors [S, ...], and the experts' rows in the forward pass of one sequence."""
    written: Written = {}
    rows: dict[OpSite, Tensor] = {}

    def watch(site: OpSite) -> None:
        side = known[site.op.form]

        def note(module: nn.Module, given: tuple[Any, ...], keywords: dict[str, Any], returned: Any) -> None:
            call = (module, (*given, *keywords.values()), returned)
            written[site] = tuple(tensor.detach().clone() for tensor in side.writes(call))

        def note_rows(module: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
            rows[site] = returned[0].detach().clone()

        module = _module(model, site)
        taps.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        if side.each is not None:
            taps.callback(module.get_submodule("experts").register_forward_hook(note_rows).remove)

    with ExitStack() as taps:
        for site in forward.sites():
            if site.op.megatron:
                watch(site)
        yield written, rows


def _module(model: GPTModel, site: OpSite) -> nn.Module:
    owner: nn.Module = model if site.layer is None else model.decoder.layers[site.layer]
    return owner.get_submodule(site.op.megatron)
