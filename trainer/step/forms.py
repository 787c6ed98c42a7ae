"""Megatron's side of every form of op (`models.forms`): what a call of its module shows of the op.

`SIDES` is the table. An architecture with a form of its own enters it there, beside its Megatron mapping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from fp8rl.models import forms
from fp8rl.models.forms import OpForm
from fp8rl.trainer.modules.exact.attention import CoreAttention
from fp8rl.trainer.modules.exact.experts import MoE
from fp8rl.trainer.modules.exact.latent import LatentCore

Call = tuple[Any, tuple[Any, ...], Any]
"""A module, what it was given, and what it returned, in Megatron's shapes, for one sequence."""


@dataclass(frozen=True)
class MegatronSide:
    """One form of op in Megatron.

    Attributes:
        writes: what the op wrote, [S, ...] each, of a call of its module.
        each: what each of a token's experts adds [S, k, H], of the module, probabilities, chosen experts, and the rows
            [S * k, H] that its `experts` put out in the order of experts, then tokens; None where there are none.
        constants: the values of the form's constants, of the model and the module.
    """

    writes: Callable[[Call], tuple[Tensor, ...]]
    each: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor] | None = None
    constants: Callable[[GPTModel, nn.Module], tuple[float, ...]] | None = None


def output(call: Call) -> tuple[Tensor, ...]:
    """What the module returned, without a bias beside it."""
    returned = call[2]
    return (_rows(returned[0] if isinstance(returned, tuple) else returned),)


def _norm(call: Call) -> tuple[Tensor, ...]:
    module, given, _ = call
    # Inside a linear module it is taken again, as the module need not let it out of one kernel.
    return (_rows(module.normalized(given[0])),) if hasattr(module, "normalized") else output(call)


def _add_norm(call: Call) -> tuple[Tensor, ...]:
    return *_norm(call), _rows(call[1][0])


def _qkv(call: Call) -> tuple[Tensor, ...]:
    """Megatron interleaves q, k and v by group of heads."""
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
    """The narrow rows of an attention, whose products are taken again."""
    module, (x, *_), _ = call
    return tuple(_rows(linear(x)[0]) for linear in (module.linear_q_down_proj, module.linear_kv_down_proj))


def _linear(call: Call) -> tuple[Tensor, ...]:
    module, given, _ = call
    return (_rows(module.gating(given[0])),) if hasattr(module, "gating") else output(call)


def _input(call: Call) -> tuple[Tensor, ...]:
    """The input of the product behind it."""
    return (_rows(call[1][0]),)


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
    """A sequence's tokens [S, ...] of what Megatron passes on: [S, 1, ...], logits [1, S, V]."""
    return tensor.squeeze(0) if tensor.shape[0] == 1 else tensor.squeeze(1)


def _epsilon(model: GPTModel, _: nn.Module) -> tuple[float, ...]:
    return (model.config.layernorm_epsilon,)


def _theta(model: GPTModel, module: nn.Module) -> tuple[float, ...]:
    return (module.rope_theta if isinstance(module, CoreAttention) else model.rotary_base,)


def _rotation(model: GPTModel, module: nn.Module) -> tuple[float, ...]:
    """1 as the factor of a model without YaRN."""
    if isinstance(module, LatentCore):
        return module.rope_theta, module.yarn.factor if module.yarn is not None else 1.0
    return model.config.rotary_base, model.config.rotary_scaling_factor


SIDES: dict[OpForm, MegatronSide] = {
    forms.EMBED: MegatronSide(output),
    forms.NORM: MegatronSide(_norm, constants=_epsilon),
    forms.ADD_NORM: MegatronSide(_add_norm, constants=_epsilon),
    forms.QKV: MegatronSide(_qkv),
    forms.HEAD_NORM: MegatronSide(output, constants=_epsilon),
    forms.HEADS_NORM: MegatronSide(output, constants=_epsilon),
    forms.ROPE: MegatronSide(_rope, constants=_theta),
    forms.ATTENTION: MegatronSide(output),
    forms.LATENT_DOWN: MegatronSide(_latent_down),
    forms.LATENT_ATTENTION: MegatronSide(output, constants=_rotation),
    forms.LINEAR: MegatronSide(_linear),
    forms.SWIGLU: MegatronSide(_input),
    forms.TOPK: MegatronSide(_topk),
    forms.EXPERTS: MegatronSide(output, each=_each_expert),
    forms.ROUTER: MegatronSide(_linear),
    forms.SIGMOID_TOPK: MegatronSide(_topk),
    forms.EXPERTS_AND_SHARED: MegatronSide(output, each=_each_expert),
    forms.LOGPROBS: MegatronSide(output),  # no module: the loss computes them behind the model
}
"""Where each form is recorded."""
