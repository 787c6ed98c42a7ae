"""What goes into each op of the trainer's forward and what comes out, as a recording of `models.trace`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from models.forms import LOGPROBS
from models.trace import CHOSEN, EACH, LENGTHS, TARGETS, TOKENS, Forward, OpTrace, Place, recorded
from numerics import ops
from numerics.errors import user_error
from trainer import device
from trainer.step.batch import TokenBatch
from trainer.step.forms import SIDES

if TYPE_CHECKING:
    from trainer.trainer import Trainer

Written = dict[Place | tuple[Place, str], tuple[Tensor, ...]]
"""What each op wrote; and by (place, name) what else was seen of it."""


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
    with torch.no_grad(), _written(model, forward) as written:
        model(tokens, position_ids=None, attention_mask=None)
    record, values = {TARGETS: targets}, {TOKENS: tokens[0]}
    for place in forward.places():
        op = place.op
        if op.form is LOGPROBS:  # after the forward, in the loss
            written[place] = (ops.token_logprobs(values[op.reads[0]], targets, temperature)[0],)
        record |= recorded(place, [values.get(name) for name in op.reads], written[place])
        if (place, EACH) in written:
            record[place.key(EACH)] = written[place, EACH][0]
        values |= zip(op.writes, written[place], strict=True)
    return record


@contextmanager
def _written(model: GPTModel, forward: Forward) -> Iterator[Written]:
    """Watch a forward of one sequence; tensors are [S, ...]."""
    seen: Written = {}

    def watch(place: Place) -> None:
        module, side = _module(model, place), SIDES[place.op.form]
        if side.each is not None:
            taps.callback(module.get_submodule("experts").register_forward_hook(note_rows(place)).remove)

        def note(module: nn.Module, given: tuple[Any, ...], keywords: dict[str, Any], returned: Any) -> None:
            call = (module, (*given, *keywords.values()), returned)
            seen[place] = tuple(tensor.detach().clone() for tensor in side.writes(call))
            if side.each is not None:
                probs, chosen = seen[routed(place)]
                seen[place, EACH] = (side.each(module, probs, chosen, seen[place, "rows"][0]),)

        taps.callback(module.register_forward_hook(note, with_kwargs=True).remove)

    def note_rows(place: Place) -> Callable[..., None]:
        def note(_: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
            seen[place, "rows"] = (returned[0].detach().clone(),)

        return note

    def routed(place: Place) -> Place:
        assert place.layer is not None
        return next(Place(place.layer, op) for op in forward.layers[place.layer] if CHOSEN in op.writes)

    with ExitStack() as taps:
        for place in forward.places():
            if place.op.megatron:
                watch(place)
        yield seen


def _module(model: GPTModel, place: Place) -> nn.Module:
    owner: nn.Module = model if place.layer is None else model.decoder.layers[place.layer]
    return owner.get_submodule(place.op.megatron)


def _settings(model: GPTModel, forward: Forward) -> dict[str, float]:
    """The constants of the ops, by name, each as the first op with it has it."""
    found: dict[str, float] = {}
    for place in forward.places():
        name = place.op.form.constant
        constant = SIDES[place.op.form].constant if name is not None and name not in found else None
        if name is not None and constant is not None:
            found[name] = float(constant(model, _module(model, place)))
    return found
