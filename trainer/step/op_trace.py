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

from models.trace import EACH, LENGTHS, TARGETS, TOKENS, Form, Forward, OpTrace, Place, recorded
from numerics import ops
from numerics.errors import user_error
from trainer import device
from trainer.modules.exact.attention import CoreAttention
from trainer.modules.exact.experts import MoE
from trainer.step.batch import TokenBatch

if TYPE_CHECKING:
    from trainer.trainer import Trainer

Call = tuple[Any, tuple[Any, ...], Any]
"""A module, what it was given, and what it returned, in Megatron's shapes."""
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
    return OpTrace(tensors | {LENGTHS: batch.lengths.cpu().clone()}, _settings(trainer.model))


def _trace(model: GPTModel, forward: Forward, tokens: Tensor, temperature: float) -> dict[str, Tensor]:
    """The recording of one sequence [1, S]."""
    targets = F.pad(tokens[0, 1:], (0, 1))
    with torch.no_grad(), _written(model, forward) as written:
        model(tokens, position_ids=None, attention_mask=None)
    record, values = {TARGETS: targets}, {TOKENS: tokens[0]}
    for place in forward.places():
        op = place.op
        if op.form == "logprobs":  # after the forward, in the loss
            written[place] = (ops.token_logprobs(values[op.reads[0]], targets, temperature)[0],)
        record |= recorded(place, [values.get(name) for name in op.reads], written[place])
        if op.form == "experts":
            record[place.key(EACH)] = written[place, EACH][0]
        values |= zip(op.writes, written[place], strict=True)
    return record


@contextmanager
def _written(model: GPTModel, forward: Forward) -> Iterator[Written]:
    """Watch a forward of one sequence; tensors are [S, ...]."""
    seen: Written = {}

    def watch(place: Place) -> None:
        owner = model if place.layer is None else model.decoder.layers[place.layer]
        module = owner.get_submodule(place.op.megatron)
        if place.op.form == "experts":
            taps.callback(module.get_submodule("experts").register_forward_hook(note_rows(place)).remove)

        def note(module: nn.Module, given: tuple[Any, ...], keywords: dict[str, Any], returned: Any) -> None:
            call = (module, (*given, *keywords.values()), returned)
            seen[place] = tuple(tensor.detach().clone() for tensor in _WRITES[place.op.form](call))
            if place.op.form == "experts":
                probs, chosen = seen[routed(place)]
                seen[place, EACH] = (_each_expert(module, probs, chosen, seen[place, "rows"][0]),)

        taps.callback(module.register_forward_hook(note, with_kwargs=True).remove)

    def note_rows(place: Place) -> Callable[..., None]:
        def note(_: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
            seen[place, "rows"] = (returned[0].detach().clone(),)

        return note

    def routed(place: Place) -> Place:
        assert place.layer is not None
        return next(Place(place.layer, op) for op in forward.layers[place.layer] if op.form == "topk")

    with ExitStack() as taps:
        for place in forward.places():
            if place.op.megatron:
                watch(place)
        yield seen


def _output(call: Call) -> tuple[Tensor, ...]:
    returned = call[2]
    return (_rows(returned[0] if isinstance(returned, tuple) else returned),)


def _norm(call: Call) -> tuple[Tensor, ...]:
    module, given, _ = call
    # Inside a linear module it is taken again, as the module need not let it out of one kernel.
    return (_rows(module.normalized(given[0])),) if hasattr(module, "normalized") else _output(call)


def _add_norm(call: Call) -> tuple[Tensor, ...]:
    return *_norm(call), _rows(call[1][0])


def _qkv(call: Call) -> tuple[Tensor, ...]:
    """Megatron interleaves q, k and v by group of heads."""
    (fused,), config = _output(call), call[0].config
    size, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
    grouped = fused.unflatten(1, (config.num_query_groups, queries + 2, size))
    q, k, v = grouped.split((queries, 1, 1), 2)
    return q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)


def _rope(call: Call) -> tuple[Tensor, ...]:
    module, (q, k, *_), _ = call
    if isinstance(module, CoreAttention):  # rotates inside
        q, k = (module.rotated(x.transpose(0, 1)).transpose(0, 1) for x in (q, k))
    return _rows(q), _rows(k)


def _linear(call: Call) -> tuple[Tensor, ...]:
    module, given, _ = call
    return (_rows(module.gating(given[0])),) if hasattr(module, "gating") else _output(call)


def _input(call: Call) -> tuple[Tensor, ...]:
    """Of the product behind it."""
    return (_rows(call[1][0]),)


def _topk(call: Call) -> tuple[Tensor, ...]:
    probs, routing_map = call[2]
    chosen = routing_map.nonzero()[:, 1].view(len(routing_map), -1)  # ascending expert id
    return probs.float(), chosen


_WRITES: dict[Form, Callable[[Call], tuple[Tensor, ...]]] = {
    "embed": _output,
    "norm": _norm,
    "add_norm": _add_norm,
    "qkv": _qkv,
    "head_norm": _output,
    "rope": _rope,
    "attention": _output,
    "linear": _linear,
    "swiglu": _input,
    "topk": _topk,
    "experts": _output,
}


def _each_expert(layer: nn.Module, probs: Tensor, chosen: Tensor, rows: Tensor) -> Tensor:
    """[S, k, H]: what each of a token's experts adds, of `rows` [S * k, H] in the order of experts, then tokens."""
    routing = torch.zeros_like(probs, dtype=torch.bool).scatter(1, chosen, True)
    expert_of_row, token_of_row = routing.t().nonzero().unbind(1)
    if isinstance(layer, MoE):  # weighted where they are added, elsewhere inside the experts
        rows = (rows.float() * probs[token_of_row, expert_of_row, None]).to(rows.dtype)
    return rows[token_of_row.argsort(stable=True)].view(*chosen.shape, -1)


def _rows(tensor: Tensor) -> Tensor:
    """A sequence's tokens [S, ...] of what Megatron passes on: [S, 1, ...], logits [1, S, V]."""
    return tensor.squeeze(0) if tensor.shape[0] == 1 else tensor.squeeze(1)


def _settings(model: GPTModel) -> dict[str, float]:
    core = model.decoder.layers[0].self_attention.core_attention
    theta = core.rope_theta if isinstance(core, CoreAttention) else model.rotary_base
    return {"rope_theta": float(theta), "norm_eps": model.config.layernorm_epsilon}
