"""The engine's own ops on given inputs, one by one, and its own forward of given tokens.

A probe (`rollout.protocol`) names a safetensors file with the trainer's recording (`models.trace`). Each op of the
engine, with whatever hooks are installed in it, gets the inputs that the trainer's op had. The answer is a second file
beside the first. Nothing of the engine's state is touched: keys and values stand in a cache of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from models import Model
from models.trace import (
    CHOSEN,
    EACH,
    LENGTHS,
    LOGITS,
    LOGPROBS,
    RESIDUAL,
    TARGETS,
    TOKENS,
    Form,
    Place,
    inputs,
    recorded,
)
from numerics import ops
from numerics.sampling import GREEDY
from rollout.plugin.state import state

ANSWER = "engine.safetensors"
"""Name of the answer, in the recording's directory.

Keys: `place:out.name` and `place:each` as in the recording, from the trainer's inputs. From the tokens alone, each op
on the output of the engine's op before it: `free.logits` [T, V], `free.logprobs` FP32 [T], `free.stream` [layers, T, H]
(the residual stream that goes into each layer), and with experts `free.chosen` int64 [T, layers with experts, k].
Metadata: `settings`, constants of the ops as JSON.
"""


@torch.no_grad()
def answer(runner: Any, recording: Path) -> str:
    """Write the answer to a recording; the SHA-256 of its bytes. `runner` is SGLang's ModelRunner."""
    with safe_open(recording, framework="pt") as file:
        record = {name: file.get_tensor(name) for name in file.keys()}
        temperature = float(file.metadata()["temperature"])
    engine = EngineOps(runner, state().weights.definition, record[LENGTHS], record[TARGETS], temperature)
    outputs: dict[str, Tensor] = {}
    for place in engine.places:
        read = engine.on_device(inputs(record, place))
        outputs |= recorded(place, (), engine.run(place, read))
        if place.op.form == "experts":
            outputs[place.key(EACH)] = engine.each_expert(place, read)
    outputs |= {f"free.{name}": tensor for name, tensor in engine.forward(_tokens(record, engine.places)).items()}
    path = recording.with_name(ANSWER)
    save_file(
        {name: t.cpu().contiguous().clone() for name, t in outputs.items()},
        path,
        {"settings": json.dumps(engine.settings())},
    )
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _tokens(record: dict[str, Tensor], places: Sequence[Place]) -> Tensor:
    return next(record[place.key(f"in.{TOKENS}")] for place in places if TOKENS in place.op.reads)


Read = Sequence[Tensor | None]


class EngineOps:
    """The ops of SGLang's model, by `definition`, on the tokens of some sequences, end to end.

    lengths: int64 [sequences]. targets: int64 [T], the tokens whose log-probabilities the last op gives.
    """

    def __init__(self, runner: Any, definition: Model, lengths: Tensor, targets: Tensor, temperature: float) -> None:
        self._runner, self._model, self._sizes = runner, runner.model, definition.sizes
        self.places = definition.forward.places()
        self._device = next(runner.model.parameters()).device
        self._lengths, self._targets, self._temperature = lengths.to(self._device), targets, temperature
        self._positions = torch.cat([torch.arange(n, device=self._device) for n in lengths.tolist()])
        self._forms: dict[Form, Callable[..., tuple[Tensor, ...]]] = {
            "embed": lambda module, tokens: (module(tokens),),
            "norm": lambda module, x: (module(x),),
            "add_norm": _add_norm,
            "qkv": self._qkv,
            "head_norm": lambda module, x: (module(x.flatten(0, 1)).view(x.shape),),
            "rope": self._rope,
            "attention": lambda module, q, k, v: (self._attention(module, q, k, v),),
            "linear": self._linear,
            "swiglu": lambda module, x: (module(x),),
            "topk": _top_k,
            "experts": lambda module, x, probs, chosen: (self._routed(module, x, probs.gather(1, chosen), chosen),),
            "logprobs": lambda _, logits: (self._logprobs(logits),),
        }

    def on_device(self, read: Read) -> Read:
        return [None if tensor is None else tensor.to(self._device) for tensor in read]

    def run(self, place: Place, read: Read) -> tuple[Tensor, ...]:
        """What one op writes."""
        # SGLang writes some results into its inputs.
        given = (None if tensor is None else tensor.clone() for tensor in read)
        return self._forms[place.op.form](self._module(place), *given)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """The whole forward, op after op."""
        values: dict[str, Tensor] = {TOKENS: tokens.to(self._device)}
        streams: dict[int, Tensor] = {}
        chosen = []
        for place in self.places:
            values |= zip(place.op.writes, self.run(place, [values.get(name) for name in place.op.reads]), strict=True)
            if place.layer is not None and RESIDUAL in place.op.writes:
                streams.setdefault(place.layer, values[RESIDUAL])
            if CHOSEN in place.op.writes:
                chosen.append(values[CHOSEN].sort(-1).values)
        found = {LOGITS: values[LOGITS], LOGPROBS: values[LOGPROBS], "stream": torch.stack(list(streams.values()))}
        return found | ({CHOSEN: torch.stack(chosen, 1)} if chosen else {})

    def each_expert(self, place: Place, read: Read) -> Tensor:
        """[T, k, H]: what each of a token's experts adds to the output, all others having a weight of zero."""
        x, probs, chosen = read
        assert x is not None and probs is not None and chosen is not None
        weights = probs.gather(1, chosen)
        alone = torch.eye(chosen.shape[1], device=self._device)
        module = self._module(place)
        return torch.stack([self._routed(module, x.clone(), weights * only, chosen) for only in alone], 1)

    def settings(self) -> dict[str, float]:
        rope, norm = (next(p for p in self.places if p.op.form == form) for form in ("rope", "add_norm"))
        return {"rope_theta": float(self._module(rope).base), "norm_eps": self._module(norm).variance_epsilon}

    def _module(self, place: Place) -> Any:
        owner = self._model if place.layer is None else self._model.model.layers[place.layer]
        return owner.get_submodule(place.op.engine)

    def _qkv(self, module: Any, x: Tensor) -> tuple[Tensor, ...]:
        size, keys = self._sizes.head_dim, self._sizes.kv_heads
        return module(x)[0].unflatten(-1, (-1, size)).split((self._sizes.heads, keys, keys), 1)

    def _rope(self, module: Any, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        rotated = module(self._positions, q.flatten(1), k.flatten(1))
        return tuple(new.view(old.shape) for new, old in zip(rotated, (q, k), strict=True))

    def _linear(self, module: Any, x: Tensor) -> tuple[Tensor, ...]:
        if module is not self._model.lm_head:
            return (module(x)[0],)
        return (self._model.logits_processor._compute_lm_head(x, module)[:, : self._sizes.vocab_size],)

    def _attention(self, attn: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Prefill of whole sequences; token t lies in slot t of a cache."""
        dtype, lengths = self._runner.kv_cache_dtype, self._lengths
        starts = lengths.cumsum(0) - lengths
        slots = starts[:, None] + torch.arange(int(lengths.max()), device=self._device)
        slots = slots.clamp(max=len(q) - 1)
        requests = torch.arange(len(lengths), device=self._device)
        k, v, out = k.to(dtype), v.to(dtype), torch.empty_like(q)
        if self._device.type == "cpu":
            self._runner.attn_backend._run_sdpa_forward_extend(
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
            raise NotImplementedError(
                "the attention of SGLang's GPU backends runs on the batches of its scheduler only: found native mode "
                "on a GPU, expected exact mode or a CPU. Ask without the comparison op by op"
            )
        return out.flatten(1)

    def _logprobs(self, logits: Tensor) -> Tensor:
        """Through the engine's sampler, as if each target had been asked for."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        count = len(logits)
        one = torch.ones(count, device=self._device)
        info = SamplingBatchInfo(
            temperatures=torch.full((count, 1), self._temperature, device=self._device),
            top_ps=one,
            top_ks=one,
            min_ps=one,
            is_all_greedy=False,
            is_any_greedy=False,
            need_top_p_sampling=False,
            need_top_k_sampling=False,
            need_min_p_sampling=False,
            sampling_seed=torch.full((count,), GREEDY, device=self._device),
            vocab_size=logits.shape[1],
            device=str(self._device),
        )
        output = LogitsProcessorOutput(next_token_logits=logits.float().clone())
        targets = [[token] for token in self._targets.tolist()]
        self._runner.sampler(output, info, True, [0] * count, targets, self._positions)
        return torch.stack([torch.as_tensor(row)[0] for row in output.next_token_token_ids_logprobs_val]).float()

    def _routed(self, module: Any, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        logits = torch.zeros(len(x), module.num_experts, device=self._device)
        return module(x, StandardTopKOutput(probs.float(), ids.int(), logits))


def _add_norm(module: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
    return (module(x.clone()), x) if residual is None else tuple(module(x, residual))


def _top_k(module: Any, logits: Tensor) -> tuple[Tensor, ...]:
    """Experts in the engine's own order, in which it adds them up."""
    config = module.topk_config
    recording, config.allow_routed_experts_capture = config.allow_routed_experts_capture, False
    try:
        output = module(logits, logits.clone())
    finally:
        config.allow_routed_experts_capture = recording
    chosen = output.topk_ids.long()
    return torch.zeros_like(logits, dtype=torch.float32).scatter(1, chosen, output.topk_weights.float()), chosen
