"""What goes into each op of the trainer's forward and what comes out, as a recording of `models.trace`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from fp8rl.models.forms import LOGPROBS
from fp8rl.models.trace import EACH, LENGTHS, TARGETS, TOKENS, Forward, OpSite, OpTrace, recorded
from fp8rl.numerics import ops
from fp8rl.numerics.errors import user_error
from fp8rl.trainer import device
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.forms import SIDES

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

Written = dict[OpSite, tuple[Tensor, ...]]
"""What each op wrote."""


def trace_ops(trainer: Trainer, batch: TokenBatch) -> OpTrace:
    """Run the sequences of `batch` forward, each by itself, and record every op.

    Raises:
        UserError: the trainer has several ranks, each of which sees a part of an op, or TransformerEngine's layers.
    """
    if trainer.config.world_size > 1:
        raise user_error(
            "trainer",
            found=f"{trainer.config.world_size} ranks",
            expected="1: with several, no rank sees a whole op",
            remedy="Attribute with a trainer of one rank and numerics.k_splits set to the run's trainer.tp.",
        )
    if trainer.lowering.transformer_engine:
        raise user_error(
            "numerics.mode",
            found="native, on TransformerEngine",
            expected="layers of which every op can be seen: TransformerEngine's fuse some",
            remedy="Attribute with numerics.mode=exact, or on a machine without a GPU.",
        )
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for row in range(batch.rows):
        tokens = batch.tokens[row : row + 1, : int(batch.lengths[row])].to(device.current())
        for name, tensor in _trace(trainer.model, trainer.definition.forward, tokens, batch.temperature).items():
            parts[name].append(tensor.cpu())
    tensors = {name: torch.cat(rows).contiguous() for name, rows in parts.items()}
    tensors[LENGTHS] = batch.lengths.cpu().clone()
    return OpTrace(tensors, _settings(trainer.model, trainer.definition.forward))


def _trace(model: GPTModel, forward: Forward, tokens: Tensor, temperature: float) -> dict[str, Tensor]:
    """The recording of one sequence [1, S]."""
    targets = F.pad(tokens[0, 1:], (0, 1))
    with torch.no_grad(), _watched(model, forward) as (written, rows):
        model(tokens, position_ids=None, attention_mask=None)
    record, values = {TARGETS: targets}, {TOKENS: tokens[0]}
    for place in forward.places():
        op = place.op
        if op.form is LOGPROBS:  # after the forward, in the loss
            written[place] = (ops.token_logprobs(values[op.reads[0]], targets, temperature)[0],)
        record |= recorded(place, [values.get(name) for name in op.reads], written[place])
        if (each := SIDES[op.form].each) is not None:
            _, probs, chosen, *_ = (values[name] for name in op.reads)
            record[place.key(EACH)] = each(_module(model, place), probs, chosen, rows[place])
        values |= zip(op.writes, written[place], strict=True)
    return record


@contextmanager
def _watched(model: GPTModel, forward: Forward) -> Iterator[tuple[Written, dict[OpSite, Tensor]]]:
    """What the ops of a forward of one sequence write, and the rows that experts put out; tensors are [S, ...]."""
    written: Written = {}
    rows: dict[OpSite, Tensor] = {}

    def watch(place: OpSite) -> None:
        side = SIDES[place.op.form]

        def note(module: nn.Module, given: tuple[Any, ...], keywords: dict[str, Any], returned: Any) -> None:
            call = (module, (*given, *keywords.values()), returned)
            written[place] = tuple(tensor.detach().clone() for tensor in side.writes(call))

        def note_rows(module: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
            rows[place] = returned[0].detach().clone()

        module = _module(model, place)
        taps.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        if side.each is not None:
            taps.callback(module.get_submodule("experts").register_forward_hook(note_rows).remove)

    with ExitStack() as taps:
        for place in forward.places():
            if place.op.megatron:
                watch(place)
        yield written, rows


def _module(model: GPTModel, place: OpSite) -> nn.Module:
    owner: nn.Module = model if place.layer is None else model.decoder.layers[place.layer]
    return owner.get_submodule(place.op.megatron)


def _settings(model: GPTModel, forward: Forward) -> dict[str, float]:
    """The constants of the ops, by name, each as the first op with it has it."""
    found: dict[str, float] = {}
    for at in reversed(forward.places()):
        if (read := SIDES[at.op.form].constants) is not None:
            found |= zip(at.op.form.constants, map(float, read(model, _module(model, at))), strict=True)
    return found
