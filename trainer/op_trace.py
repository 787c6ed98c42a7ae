"""What goes into each op of the trainer's forward and what comes out, under the names of `numerics.traced_ops`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from numerics import ops
from numerics.errors import user_error
from numerics.traced_ops import OpTrace, Place, key
from trainer import device
from trainer.batch import TokenBatch
from trainer.modules.exact.attention import CoreAttention
from trainer.modules.exact.experts import MoE

if TYPE_CHECKING:
    from trainer.trainer import Trainer

Seen = dict[Place, Tensor]
"""Tensors of one sequence by layer and by where in the layer they were seen, the tokens first."""


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
    parts: dict[str, list[Tensor]] = defaultdict(list)
    if trainer.lowering.transformer_engine:
        raise user_error(
            "numerics.mode",
            found="native, on TransformerEngine",
            expected="layers of which every op can be seen: TransformerEngine's fuse some",
            remedy="Attribute with numerics.mode=exact, or on a machine without a GPU.",
        )
    for row in range(batch.rows):
        tokens = batch.tokens[row : row + 1, : int(batch.lengths[row])].to(device.current())
        for name, tensor in _trace(trainer.model, tokens, batch.temperature).items():
            parts[name].append(tensor.cpu())
    tensors = {name: torch.cat(rows).contiguous() for name, rows in parts.items()}
    return OpTrace(tensors | {"lengths": batch.lengths.cpu().clone()}, _settings(trainer.model))


def _trace(model: GPTModel, tokens: Tensor, temperature: float) -> dict[str, Tensor]:
    with torch.no_grad(), _taps(model) as seen:
        model(tokens, position_ids=None, attention_mask=None)
    logits = seen[None, "logits"]
    targets = F.pad(tokens[0, 1:], (0, 1))
    logprobs, _ = ops.token_logprobs(logits, targets, temperature)
    record = {"targets": targets}
    record |= _op((None, "embed"), seen[None, "embedded"], tokens=tokens[0])
    for index, layer in enumerate(model.decoder.layers):
        record |= _attention_ops(seen, index, layer.self_attention)
        record |= _moe_ops(seen, index, layer.mlp) if isinstance(layer.mlp, MoELayer) else _dense_ops(seen, index)
    record |= _norm((None, "final_norm"), seen, len(model.decoder.layers), seen[None, "stream"], seen[None, "normed"])
    record |= _op((None, "lm_head"), logits, x=seen[None, "normed"])
    record |= _op((None, "logprobs"), logprobs, logits=logits)
    return record


def _attention_ops(seen: Seen, i: int, attention: nn.Module) -> dict[str, Tensor]:
    q, k, v = (seen[i, name] for name in "qkv")
    q_raw, k_raw = seen[i, "q_raw"], seen[i, "k_raw"]
    q_normed, k_normed = seen[i, "q_normed"], seen[i, "k_normed"]
    core = attention.core_attention
    if isinstance(core, CoreAttention):  # rotates inside
        q, k = (ops.rope(x[None], torch.arange(len(x))[None].to(x.device), core.rope_theta)[0] for x in (q, k))
    return {
        **_norm((i, "input_norm"), seen, i, seen[i, "stream"], seen[i, "normed"]),
        **_op((i, "qkv"), torch.cat([x.flatten(1) for x in (q_raw, k_raw, v)], -1), x=seen[i, "normed"]),
        **_op((i, "q_norm"), q_normed, x=q_raw),
        **_op((i, "k_norm"), k_normed, x=k_raw),
        **_op((i, "rope"), torch.cat((q, k), 1), q=q_normed, k=k_normed),
        **_op((i, "attention"), seen[i, "attended"], q=q, k=k, v=v),
        **_op((i, "o_proj"), seen[i, "attention_out"], x=seen[i, "attended"]),
        **_op(
            (i, "post_norm"),
            torch.stack((seen[i, "mlp_in"], seen[i, "mlp_stream"]), 1),
            x=seen[i, "attention_out"],
            residual=seen[i, "stream"],
        ),
    }


def _moe_ops(seen: Seen, i: int, mlp: nn.Module) -> dict[str, Tensor]:
    logits, probs, routing = seen[i, "router_logits"], seen[i, "probs"], seen[i, "routing_map"]
    chosen = routing.nonzero()[:, 1].view(len(routing), -1)  # ascending expert id
    each = seen[i, "expert_rows"]
    # Rows stand in the order of their experts, and of their tokens within one.
    expert_of_row, token_of_row = routing.t().nonzero().unbind(1)
    if isinstance(mlp, MoE):  # weighted where they are added, elsewhere inside the experts
        each = (each.float() * probs[token_of_row, expert_of_row, None]).to(each.dtype)
    by_token = each[token_of_row.argsort(stable=True)].view(*chosen.shape, -1)
    return {
        **_op((i, "router"), logits, x=seen[i, "mlp_in"]),
        **_op((i, "topk"), probs.float(), logits=logits),
        **_op((i, "experts"), seen[i, "mlp_out"], x=seen[i, "mlp_in"], probs=probs.float(), chosen=chosen),
        key((i, "experts"), "each"): by_token,
    }


def _dense_ops(seen: Seen, i: int) -> dict[str, Tensor]:
    return {
        **_op((i, "gate_up"), seen[i, "gate_up"], x=seen[i, "mlp_in"]),
        **_op((i, "swiglu"), seen[i, "gated"], x=seen[i, "gate_up"]),
        **_op((i, "down"), seen[i, "mlp_out"], x=seen[i, "gated"]),
    }


def _norm(place: Place, seen: Seen, i: int, total: Tensor, normed: Tensor) -> dict[str, Tensor]:
    """The norm before layer i, with the addition of the residual that the layer before left to it."""
    out = torch.stack((normed, total), 1)
    if i == 0:
        return _op(place, out, x=total)
    return _op(place, out, x=seen[i - 1, "mlp_out"], residual=seen[i - 1, "mlp_stream"])


def _op(place: Place, out: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
    return {key(place, name): tensor for name, tensor in {**inputs, "out": out}.items()}


@contextmanager
def _taps(model: GPTModel) -> Iterator[Seen]:
    """Watch a forward of one sequence: what the modules of `model` are given and what they return."""
    seen: Seen = {}
    with ExitStack() as taps:

        def watch(module: nn.Module, layer: int | None, given: tuple[str, ...] = (), returned: str = "") -> None:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                for name, tensor in zip(given, (*args, *kwargs.values())):
                    seen[layer, name] = _rows(tensor)
                if returned:
                    seen[layer, returned] = _rows(output[0] if isinstance(output, tuple) else output)

            taps.callback(module.register_forward_hook(hook, with_kwargs=True).remove)

        def watch_norm(linear: nn.Module, layer: int, name: str) -> None:
            """The norm inside a linear module, taken again, as the module need not let it out of one kernel."""

            def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
                seen[layer, name] = _rows(module.normalized(args[0]))

            taps.callback(linear.register_forward_hook(hook).remove)

        def watch_call(owner: nn.Module, method: str, keep: Callable[[Any, Any], None]) -> None:
            taps.enter_context(_wrapped(owner, method, keep))

        watch(model.embedding, None, returned="embedded")
        watch(model.decoder.final_layernorm, None, ("stream",), "normed")
        watch(model.output_layer, None, returned="logits")
        for i, layer in enumerate(model.decoder.layers):
            attention, mlp = layer.self_attention, layer.mlp
            watch(attention.linear_qkv, i, ("stream",))
            watch_norm(attention.linear_qkv, i, "normed")
            watch(attention.q_layernorm, i, ("q_raw",), "q_normed")
            watch(attention.k_layernorm, i, ("k_raw",), "k_normed")
            watch(attention.core_attention, i, ("q", "k", "v"), "attended")
            watch(attention.linear_proj, i, returned="attention_out")
            watch(layer.pre_mlp_layernorm, i, ("mlp_stream",))
            if isinstance(mlp, MoELayer):
                watch(mlp, i, ("mlp_in",), "mlp_out")
                watch_call(mlp.router, "gating", _keep_logits(seen, i))
                watch_call(mlp.router, "routing", _keep_routing(seen, i))
                watch(mlp.experts, i, returned="expert_rows")
            else:
                watch(mlp, i, returned="mlp_out")
                watch_norm(mlp.linear_fc1, i, "mlp_in")
                watch(mlp.linear_fc1, i, returned="gate_up")
                watch(mlp.linear_fc2, i, ("gated",))
        yield seen


def _keep_logits(seen: Seen, i: int) -> Callable[[Any, Any], None]:
    def keep(_: dict[str, Any], output: Tensor) -> None:
        seen[i, "router_logits"] = _rows(output)

    return keep


def _keep_routing(seen: Seen, i: int) -> Callable[[Any, Any], None]:
    def keep(_: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
        seen[i, "probs"], seen[i, "routing_map"] = (tensor.detach().clone() for tensor in output)

    return keep


@contextmanager
def _wrapped(owner: nn.Module, method: str, keep: Callable[[Any, Any], None]) -> Iterator[None]:
    """Show each call of `owner.method`, its keywords and its result, to `keep`."""
    original = getattr(owner, method)
    own = vars(owner).get(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        keep(kwargs, output)
        return output

    setattr(owner, method, call)
    try:
        yield
    finally:
        delattr(owner, method)
        if own is not None:
            setattr(owner, method, own)


def _rows(tensor: Tensor) -> Tensor:
    """A sequence's tokens [S, ...] of what Megatron passes on: [S, 1, ...], logits [1, S, V], expert rows [N, H]."""
    squeezed = tensor if tensor.dim() == 2 else tensor.squeeze(0) if tensor.shape[0] == 1 else tensor.squeeze(1)
    return squeezed.detach().clone()


def _settings(model: GPTModel) -> dict[str, float]:
    config = model.config
    core = model.decoder.layers[0].self_attention.core_attention
    theta = core.rope_theta if isinstance(core, CoreAttention) else model.rotary_base
    return {"rope_theta": float(theta), "norm_eps": config.layernorm_epsilon}
