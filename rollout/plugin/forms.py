"""The engine's side of every form of op (`models.forms`): how SGLang's module of it is called on given inputs.

`SIDES` is the table. An architecture whose model in SGLang has a form of its own enters it there, where that model is
defined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fp8rl.models import forms
from fp8rl.models.forms import OpForm
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.trace import Forward
from fp8rl.numerics import ops
from fp8rl.numerics.sampling import GREEDY
from fp8rl.rollout.plugin import latent
from fp8rl.rollout.plugin.state import state

Read = Sequence[Tensor | None]
_OF_ITS_SCHEDULER = (
    "the attention of SGLang's GPU backends runs on the batches of its scheduler only: found native mode on a GPU, "
    "expected exact mode or a CPU. Ask without the comparison op by op"
)


@dataclass(frozen=True)
class Probed:
    """An engine whose ops are run on the tokens of some sequences, end to end.

    runner: SGLang's ModelRunner. lengths: int64 [sequences]. targets: int64 [T], the tokens whose log-probabilities are
    asked for at `temperature`.
    """

    runner: Any
    sizes: ModelSizes
    lengths: Tensor
    targets: Tensor
    temperature: float

    @cached_property
    def positions(self) -> Tensor:
        """int64 [T]"""
        return torch.cat([torch.arange(n, device=self.lengths.device) for n in self.lengths.tolist()])


@dataclass(frozen=True)
class EngineSide:
    """One form of op in the engine.

    Attributes:
        run: what a module of it writes, as a tuple, of what it reads.
        each: [T, k, H], what each of a token's experts adds to the output; None where there are no experts.
        constants: the values of the form's constants in a module.
        hooked: exact mode puts the form's definition there with a hook; else the model itself calls the definition.
    """

    run: Callable[..., tuple[Tensor, ...]]
    each: Callable[..., Tensor] | None = None
    constants: Callable[[Any], tuple[float, ...]] | None = None
    hooked: bool = True


def check_forms(forward: Forward, provided: tuple[str, ...]) -> None:
    """Check that every op of a model can be probed and, where hooks are to provide its definition, that one does.

    provided: names of the forms whose definition a hook puts in place of SGLang's own.

    Raises:
        RuntimeError: it names the forms.
    """
    found = {place.op.form for place in forward.places()}
    unknown = sorted(form.name for form in found - SIDES.keys())
    needed = {form for form in found & SIDES.keys() if form.definition is not None and SIDES[form].hooked}
    stock = sorted(form.name for form in needed if form.name not in provided)
    if unknown or stock:
        raise RuntimeError(
            f"fp8rl plugin: found ops of forms without an engine side {unknown}, and of forms that no hook computes by "
            f"their definition {stock}, expected neither in exact mode. Enter the first in SIDES of "
            "rollout/plugin/forms.py, where the architecture's model is defined, and give the second a row in "
            "rollout/plugin/hooks.py"
        )


def _qkv(engine: Probed, module: Any, x: Tensor) -> tuple[Tensor, ...]:
    size, keys = engine.sizes.head_dim, engine.sizes.kv_heads
    return module(x)[0].unflatten(-1, (-1, size)).split((engine.sizes.heads, keys, keys), 1)


def _add_norm(_: Probed, module: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
    return (module(x.clone()), x) if residual is None else tuple(module(x, residual))


def _rope(engine: Probed, module: Any, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    rotated = module(engine.positions, q.flatten(1), k.flatten(1))
    return tuple(new.view(old.shape) for new, old in zip(rotated, (q, k), strict=True))


def _linear(engine: Probed, module: Any, x: Tensor) -> tuple[Tensor, ...]:
    model = engine.runner.model
    if module is not model.lm_head:
        return (module(x)[0],)
    return (model.logits_processor._compute_lm_head(x, module)[:, : engine.sizes.vocab_size],)


def _attention(engine: Probed, attn: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Prefill of whole sequences; token t lies in slot t of a cache."""
    runner, lengths = engine.runner, engine.lengths
    starts = lengths.cumsum(0) - lengths
    slots = starts[:, None] + torch.arange(int(lengths.max()), device=q.device)
    slots = slots.clamp(max=len(q) - 1)
    requests = torch.arange(len(lengths), device=q.device)
    k, v, out = k.to(runner.kv_cache_dtype), v.to(runner.kv_cache_dtype), torch.empty_like(q)
    if q.device.type == "cpu":
        runner.attn_backend._run_sdpa_forward_extend(
            q,
            out,
            k,
            v,
            slots,
            requests,
            lengths,
            torch.zeros_like(lengths),
            lengths,
            scaling=attn.scaling,
            enable_gqa=attn.tp_q_head_num != attn.tp_k_head_num,
            causal=True,
        )
    elif state().numerics.mode == "exact":
        out = ops.paged_attention(q, k, v, slots.int(), requests, lengths, lengths, attn.scaling)
    else:
        raise NotImplementedError(_OF_ITS_SCHEDULER)
    return (out.flatten(1),)


def _latent_down(engine: Probed, module: Any, x: Tensor) -> tuple[Tensor, ...]:
    rank = engine.sizes.latent.q_rank if engine.sizes.latent else 0
    fused = module(x)[0]
    return fused[:, :rank], fused[:, rank:]


def _latent_attention(engine: Probed, module: Any, q: Tensor, kv_row: Tensor) -> tuple[Tensor, ...]:
    """The attention of whole sequences, whose rows lie in slots of their own; before the product behind it."""
    lengths, starts = engine.lengths, engine.lengths.cumsum(0) - engine.lengths
    slots = (starts[:, None] + torch.arange(int(lengths.max()), device=q.device)).clamp(max=len(q) - 1)
    requests = torch.arange(len(lengths), device=q.device)
    if state().numerics.mode == "native":
        if q.device.type != "cpu":
            raise NotImplementedError(_OF_ITS_SCHEDULER)
        backend, positions = engine.runner.attn_backend, engine.positions
        return (latent.own_attention(module, backend, q.flatten(1), kv_row, positions, slots, requests, lengths),)
    where = latent.Where(slots.int(), requests, lengths, lengths)
    return (latent.attend(module, q.flatten(1), kv_row, engine.positions, lambda rows: rows, where),)


def _top_k(_: Probed, module: Any, logits: Tensor) -> tuple[Tensor, ...]:
    """Experts in the engine's own order, in which it adds them up."""
    config = module.topk_config
    recording, config.allow_routed_experts_capture = config.allow_routed_experts_capture, False
    try:
        output = module(logits, logits.clone())
    finally:
        config.allow_routed_experts_capture = recording
    chosen = output.topk_ids.long()
    return torch.zeros_like(logits, dtype=torch.float32).scatter(1, chosen, output.topk_weights.float()), chosen


def _sigmoid_top_k(engine: Probed, module: Any, logits: Tensor) -> tuple[Tensor, ...]:
    """Experts and their probabilities times the factor, by which SGLang's own models multiply the sum of experts."""
    probs, chosen = _top_k(engine, module, logits)
    config = module.topk_config
    behind = state().numerics.mode == "native" and not config.apply_routed_scaling_factor_on_output
    return probs * config.routed_scaling_factor if behind else probs, chosen


def _experts(_: Probed, module: Any, x: Tensor, probs: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
    return (_routed(module, x, probs.gather(1, chosen), chosen),)


def _each_expert(_: Probed, module: Any, x: Tensor, probs: Tensor, chosen: Tensor, *shared: Tensor) -> Tensor:
    """All others have a weight of zero."""
    weights, alone = probs.gather(1, chosen), torch.eye(chosen.shape[1], device=x.device)
    return torch.stack([_routed(module, x.clone(), weights * only, chosen) for only in alone], 1)


def _experts_and_shared(
    engine: Probed, module: Any, x: Tensor, probs: Tensor, chosen: Tensor, shared: Tensor
) -> tuple[Tensor, ...]:
    return (_experts(engine, module, x, probs, chosen)[0] + shared,)


def _routed(module: Any, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    logits = torch.zeros(len(x), module.num_experts, device=x.device)
    return module(x, StandardTopKOutput(probs.float(), ids.int(), logits))


def _logprobs(engine: Probed, _: Any, logits: Tensor) -> tuple[Tensor, ...]:
    """Through the engine's sampler, as if each target had been asked for."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    count, device = len(logits), logits.device
    one = torch.ones(count, device=device)
    info = SamplingBatchInfo(
        temperatures=torch.full((count, 1), engine.temperature, device=device),
        top_ps=one,
        top_ks=one,
        min_ps=one,
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        sampling_seed=torch.full((count,), GREEDY, device=device),
        vocab_size=logits.shape[1],
        device=str(device),
    )
    output = LogitsProcessorOutput(next_token_logits=logits.float().clone())
    targets = [[token] for token in engine.targets.tolist()]
    engine.runner.sampler(output, info, True, [0] * count, targets, engine.positions)
    return (torch.stack([torch.as_tensor(row)[0] for row in output.next_token_token_ids_logprobs_val]).float(),)


def _epsilon(module: Any) -> tuple[float, ...]:
    return (module.variance_epsilon,)


def _rotation(attention: Any) -> tuple[float, ...]:
    """1 as the factor of a model without YaRN."""
    return attention.rotary_emb.base, getattr(attention.rotary_emb, "scaling_factor", 1.0)


SIDES: dict[OpForm, EngineSide] = {
    forms.EMBED: EngineSide(lambda _, module, tokens: (module(tokens),)),
    forms.NORM: EngineSide(lambda _, module, x: (module(x),), constants=_epsilon),
    forms.ADD_NORM: EngineSide(_add_norm, constants=_epsilon),
    forms.HEAD_NORM: EngineSide(lambda _, module, x: (module(x.flatten(0, 1)).view(x.shape),), constants=_epsilon),
    forms.HEADS_NORM: EngineSide(lambda _, module, x: (module(x.flatten(1)).view(x.shape),), constants=_epsilon),
    forms.QKV: EngineSide(_qkv),
    forms.ROPE: EngineSide(_rope, constants=lambda module: (module.base,)),
    forms.ATTENTION: EngineSide(_attention),
    forms.LATENT_DOWN: EngineSide(_latent_down),
    forms.LATENT_ATTENTION: EngineSide(_latent_attention, constants=_rotation),
    forms.LINEAR: EngineSide(_linear),
    forms.SWIGLU: EngineSide(lambda _, module, x: (module(x),)),
    forms.TOPK: EngineSide(_top_k),
    forms.EXPERTS: EngineSide(_experts, each=_each_expert),
    forms.ROUTER: EngineSide(lambda _, module, x: (module(x),)),
    forms.SIGMOID_TOPK: EngineSide(_sigmoid_top_k),
    forms.EXPERTS_AND_SHARED: EngineSide(_experts_and_shared, each=_each_expert),
    forms.LOGPROBS: EngineSide(_logprobs),
}
"""The engine's side of each form."""
