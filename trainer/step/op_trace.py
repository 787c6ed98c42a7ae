"""Recordings of the inputs and outputs of each op of the trainer's forward (`models.trace`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from fp8rl.models import forms
from fp8rl.models.families import attention as of_attention
from fp8rl.models.families import latent as of_latent
from fp8rl.models.families import mlp as of_mlp
from fp8rl.models.forms import LOGPROBS, OpForm
from fp8rl.models.trace import EACH, LENGTHS, TARGETS, TOKENS, Forward, OpSite, OpTrace, recorded
from fp8rl.numerics import ops
from fp8rl.numerics.core.errors import user_error
from fp8rl.trainer import device
from fp8rl.trainer.modules.exact.attention import CoreAttention
from fp8rl.trainer.modules.exact.experts import MoE
from fp8rl.trainer.modules.exact.latent import LatentCore
from fp8rl.trainer.step.batch import TokenBatch

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

# Megatron's side of every form of op (`models.forms`): what a call of its module shows of the op.
#
# `SIDES` is the table. An architecture with a form of its own enters it there, beside its Megatron mapping.

Call = tuple[Any, tuple[Any, ...], Any]
"""A module, what it was given, and what it returned, in Megatron's shapes, for one sequence."""


@dataclass(frozen=True)
class MegatronSide:
    """One form of op in Megatron."""

    writes: Callable[[Call], tuple[Tensor, ...]]
    """Returns the op's outputs, [S, ...] each, of a call of its module."""
    each: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor] | None = None
    """Returns the addends of each of a token's experts [S, k, H], of the module, probabilities, chosen experts, and the
    rows [S * k, H] that its `experts` put out in the order of experts, then tokens; None for other forms."""
    constants: Callable[[GPTModel, nn.Module], tuple[float, ...]] | None = None
    """Returns the values of the form's constants, of the model and the module."""


def output(call: Call) -> tuple[Tensor, ...]:
    """Return the module's output, without a bias beside it."""
    returned = call[2]
    return (_rows(returned[0] if isinstance(returned, tuple) else returned),)


def _norm(call: Call) -> tuple[Tensor, ...]:
    module, given, _ = call
    # Inside a linear module it is taken again, as the module need not let it out of one kernel.
    return (_rows(module.normalized(given[0])),) if hasattr(module, "normalized") else output(call)


def _qkv(call: Call) -> tuple[Tensor, ...]:
    """Return q, k and v, which Megatron interleaves by group of heads."""
    (fused,), config = output(call), call[0].config
    size, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
    grouped = fused.unflatten(1, (config.num_query_groups, queries + 2, size))
    q, k, v = grouped.split((queries, 1, 1), 2)
    return q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)


def _rope(call: Call) -> tuple[Tensor, ...]:
    module, (q, k, *_), _ = call
    if isinstance(module, CoreAttention):  # rotates inside
        q, k = (module.rotated(x.transpose(0, 1)).transpose(0, 1) for x in (q, k))
    return _rows(q), _rows(k)


def _latent_down(call: Call) -> tuple[Tensor, ...]:
    """Return the narrow rows of an attention, whose products are taken again."""
    module, (x, *_), _ = call
    return tuple(_rows(linear(x)[0]) for linear in (module.linear_q_down_proj, module.linear_kv_down_proj))


def _linear(call: Call) -> tuple[Tensor, ...]:
    module, given, _ = call
    return (_rows(module.gating(given[0])),) if hasattr(module, "gating") else output(call)


def _topk(call: Call) -> tuple[Tensor, ...]:
    probs, routing_map = call[2]
    chosen = routing_map.nonzero()[:, 1].view(len(routing_map), -1)  # ascending expert id
    return probs.float(), chosen


def _each_expert(layer: nn.Module, probs: Tensor, chosen: Tensor, rows: Tensor) -> Tensor:
    routing = torch.zeros_like(probs, dtype=torch.bool).scatter(1, chosen, True)
    expert_of_row, token_of_row = routing.t().nonzero().unbind(1)
    if isinstance(layer, MoE):  # weighted where they are added, elsewhere inside the experts
        rows = (rows.float() * probs[token_of_row, expert_of_row, None]).to(rows.dtype)
    return rows[token_of_row.argsort(stable=True)].view(*chosen.shape, -1)


def _rows(tensor: Tensor) -> Tensor:
    """Return a sequence's tokens [S, ...] of Megatron's tensors: [S, 1, ...], logits [1, S, V]."""
    return tensor.squeeze(0) if tensor.shape[0] == 1 else tensor.squeeze(1)


def _epsilon(model: GPTModel, _: nn.Module) -> tuple[float, ...]:
    return (model.config.layernorm_epsilon,)


def _theta(model: GPTModel, module: nn.Module) -> tuple[float, ...]:
    return (module.rope_theta if isinstance(module, CoreAttention) else model.rotary_base,)


def _rotation(model: GPTModel, module: nn.Module) -> tuple[float, ...]:
    """Return theta and the factor of YaRN, 1 for a model without it."""
    if isinstance(module, LatentCore):
        return module.rope_theta, module.yarn.factor if module.yarn is not None else 1.0
    return model.config.rotary_base, model.config.rotary_scaling_factor


SIDES: dict[OpForm, MegatronSide] = {
    forms.EMBED: MegatronSide(output),
    forms.NORM: MegatronSide(_norm, constants=_epsilon),
    forms.ADD_NORM: MegatronSide(lambda call: (*_norm(call), _rows(call[1][0])), constants=_epsilon),
    of_attention.QKV: MegatronSide(_qkv),
    of_attention.HEAD_NORM: MegatronSide(output, constants=_epsilon),
    of_attention.HEADS_NORM: MegatronSide(output, constants=_epsilon),
    of_attention.ROPE: MegatronSide(_rope, constants=_theta),
    of_attention.ATTENTION: MegatronSide(output),
    of_latent.LATENT_DOWN: MegatronSide(_latent_down),
    of_latent.LATENT_ATTENTION: MegatronSide(output, constants=_rotation),
    forms.LINEAR: MegatronSide(_linear),
    # The input of the product behind it.
    of_mlp.SWIGLU: MegatronSide(lambda call: (_rows(call[1][0]),)),
    of_mlp.TOPK: MegatronSide(_topk),
    of_mlp.EXPERTS: MegatronSide(output, each=_each_expert),
    of_mlp.ROUTER: MegatronSide(_linear),
    of_mlp.SIGMOID_TOPK: MegatronSide(_topk),
    of_mlp.EXPERTS_AND_SHARED: MegatronSide(output, each=_each_expert),
    forms.LOGPROBS: MegatronSide(output),  # no module: the loss computes them behind the model
}
"""The recording of each form."""

Written = dict[OpSite, tuple[Tensor, ...]]
"""The outputs of each op."""


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
    constants: dict[str, float] = {}
    for at in reversed(trainer.definition.forward.places()):  # each as the first op with it has it
        if (read := SIDES[at.op.form].constants) is not None:
            values = map(float, read(trainer.model, _module(trainer.model, at)))
            constants |= zip(at.op.form.constants, values, strict=True)
    return OpTrace(tensors, constants)


def _trace(model: GPTModel, forward: Forward, tokens: Tensor, temperature: float) -> dict[str, Tensor]:
    """Record one sequence [1, S]."""
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
    """Record the outputs of the ops in a forward of one sequence, and the rows of experts; tensors are [S, ...]."""
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
