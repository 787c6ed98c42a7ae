"""Records the inputs and outputs of each op in the trainer's forward pass (`models.trace`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from fp8rl.models import Model
from fp8rl.models.program import CHOSEN, EPS, LOGPROBS, ROPE_FACTOR, THETA, TOKENS, OpSite
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.trace import EACH, LENGTHS, TARGETS, OpTrace, recorded
from fp8rl.numerics import ops
from fp8rl.numerics.core.errors import user_error
from fp8rl.trainer import device
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.trainer import Trainer

Written = dict[OpSite, list[Tensor]]
"""The recorded outputs of each op. Each output is [S, ...]."""


def trace_ops(trainer: Trainer, batch: TokenBatch) -> OpTrace:
    """Run a forward pass for each sequence of `batch`, and record every op. Raises UserError: the trainer has several
    ranks (each sees only a part of an op) or is in native mode (which runs no program)."""
    if trainer.config.world_size > 1:
        expected = "1 rank, because with several no rank sees a whole op"
        remedy = "Compare with a trainer of one rank and numerics.k_splits set to the run's trainer.tp."
        raise user_error("trainer", f"{trainer.config.world_size} ranks", expected, remedy)
    if trainer.numerics.mode == "native":
        expected = "exact, the only mode in which the trainer's layers run a program whose ops can be recorded"
        remedy = "Compare log-probabilities and tensors, or set numerics.mode=exact to compare ops."
        raise user_error("numerics.mode", "native", expected, remedy)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for row in range(batch.rows):
        tokens = batch.tokens[row : row + 1, : int(batch.lengths[row])].to(device.current())
        for name, tensor in _trace(trainer.model, trainer.definition, tokens, batch.temperature).items():
            parts[name].append(tensor.cpu())
    tensors = {name: torch.cat(rows).contiguous() for name, rows in parts.items()}
    tensors[LENGTHS] = batch.lengths.cpu().clone()
    constants = _constants(trainer.model.decoder.layers[0].sizes)
    used = {name for site in trainer.definition.forward.sites() for name in site.op.form.constants}
    return OpTrace(tensors, {name: constants[name] for name in constants if name in used})


def _constants(sizes: ModelSizes) -> dict[str, float]:
    """Return the constants of a layer's ops."""
    scaling = sizes.rope_scaling
    return {EPS: sizes.norm_eps, THETA: sizes.rope_theta, ROPE_FACTOR: 1.0 if scaling is None else scaling.factor}


def _trace(model: GPTModel, definition: Model, tokens: Tensor, temperature: float) -> dict[str, Tensor]:
    """Record a forward pass of one sequence [1, S]."""
    targets, forward = F.pad(tokens[0, 1:], (0, 1)), definition.forward
    with torch.no_grad(), _watched(model, definition) as (written, rows):
        model(tokens, position_ids=None, attention_mask=None)
    record, values = {TARGETS: targets}, {TOKENS: tokens[0]}
    for site in forward.sites():
        if site.op.form is LOGPROBS:  # after the forward, in the loss
            written[site] = [ops.token_logprobs(values[site.op.reads[0]], targets, temperature)[0]]
        record |= recorded(site, [values.get(name) for name in site.op.reads], written[site])
        if site in rows:
            _, probs, chosen, *_ = (values[name] for name in site.op.reads)
            record[site.key(EACH)] = _each_expert(probs, chosen, rows[site])
        values |= zip(site.op.writes, written[site], strict=True)
    return record


@contextmanager
def _watched(model: GPTModel, definition: Model) -> Iterator[tuple[Written, dict[OpSite, Tensor]]]:
    """Record inside the block the outputs of all ops, and the rows that each layer's experts return."""
    written: Written = {}
    rows: dict[OpSite, Tensor] = {}
    last: list[Tensor] = []

    def note_op(site: OpSite, read: Sequence[Any], made: Sequence[Tensor]) -> None:
        found = [out.detach() if out.dim() == 2 else out.detach().flatten(0, 1) for out in made]
        if (channels := site.op.form.channels) is not None:
            widths = channels(definition.sizes)
            parts = found[0].unflatten(-1, (-1, sum(widths))).split(widths, -1)
            found[0] = torch.cat([part.flatten(1) for part in parts], 1)
        if CHOSEN in site.op.writes:
            probs, chosen = found
            found[0] = probs.new_zeros(len(probs), definition.sizes.experts).scatter(1, chosen, probs)
        written[site] = [out.clone() for out in found]
        if last:  # the experts of this op
            rows[site] = last.pop()

    def note_end(site: OpSite) -> Any:
        def note(_: Any, given: tuple[Tensor, ...], out: Any) -> None:
            made = out[0] if isinstance(out, tuple) else out
            found = [made, *given[: len(site.op.writes) - 1]]  # a norm's sum is what it was given
            written[site] = [(x[0] if x.shape[0] == 1 else x[:, 0]).detach().clone() for x in found]

        return note

    with ExitStack() as taps:
        for layer in model.decoder.layers:
            layer.watch = note_op
            taps.callback(setattr, layer, "watch", None)
            if (experts := layer.experts) is not None:
                note = experts.register_forward_hook(lambda _, __, out: last.append(out.detach().clone()))
                taps.callback(note.remove)
        for site in definition.forward.sites():
            if site.layer is None and site.op.megatron:
                tap = model.get_submodule(site.op.megatron).register_forward_hook(note_end(site))
                taps.callback(tap.remove)
        yield written, rows


def _each_expert(probs: Tensor, chosen: Tensor, rows: Tensor) -> Tensor:
    """Return the weighted outputs [S, k, H] of each token's experts. rows: [S * k, H], sorted by expert, then token."""
    order, _ = ops.group_by_expert(chosen, probs.shape[1])
    weights = probs.gather(1, chosen).flatten()[order, None]
    return (
        torch.empty_like(rows).index_copy(0, order, (rows.float() * weights).to(rows.dtype)).unflatten(0, chosen.shape)
    )
