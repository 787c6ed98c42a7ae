"""The engine's own ops on given inputs, one by one, and its own forward of given tokens.

An action of /weights_checker names a safetensors file with the trainer's recording (`numerics.traced_ops`). Each op of
the engine, with whatever hooks are installed in it, gets the inputs that the trainer's op had. The answer is a second
file beside the first. Nothing of the engine's state is touched: keys and values stand in a cache of their own.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from numerics import ops
from numerics.traced_ops import Place, inputs_of, key, places_in
from rollout.plugin.state import state

OPS = "fp8rl.ops:"
"""The action, followed by the path of the recording."""

ANSWER = "engine.safetensors"
"""Name of the answer, in the recording's directory.

Keys: `place:out` and `place:each` as in the recording, from the trainer's inputs. From the tokens alone, each op on the
output of the engine's op before it: `free.logits` [T, V], `free.logprobs` FP32 [T], `free.stream` [layers, T, H] (the
residual stream that goes into each layer), and with experts `free.chosen` int64 [T, layers, k].
Metadata: `settings`, constants of the ops as JSON.
"""


@torch.no_grad()
def answer(runner: Any, recording: Path) -> str:
    """Write the answer to a recording; the SHA-256 of its bytes. `runner` is SGLang's ModelRunner."""
    with safe_open(recording, framework="pt") as file:
        record = {name: file.get_tensor(name) for name in file.keys()}
        temperature = float(file.metadata()["temperature"])
    engine = EngineOps(runner, record["lengths"], record["targets"], temperature)
    outputs: dict[str, Tensor] = {}
    for place in places_in(record):
        for name, tensor in engine.run(place, inputs_of(record, place)).items():
            outputs[key(place, name)] = tensor
    outputs |= {f"free.{name}": tensor for name, tensor in engine.forward(record["embed:tokens"]).items()}
    path = recording.with_name(ANSWER)
    save_file(
        {name: t.cpu().contiguous().clone() for name, t in outputs.items()},
        path,
        {"settings": json.dumps(engine.settings())},
    )
    return hashlib.sha256(path.read_bytes()).hexdigest()


class EngineOps:
    """The ops of SGLang's Qwen3ForCausalLM or Qwen3MoeForCausalLM on the tokens of some sequences, end to end.

    lengths: int64 [sequences]. targets: int64 [T], the tokens whose log-probabilities the last op gives.
    """

    def __init__(self, runner: Any, lengths: Tensor, targets: Tensor, temperature: float) -> None:
        self._runner, self._model = runner, runner.model.model
        self._device = next(runner.model.parameters()).device
        self._lengths, self._targets, self._temperature = lengths.to(self._device), targets, temperature
        self._positions = torch.cat([torch.arange(n, device=self._device) for n in lengths.tolist()])

    def run(self, place: Place, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """One op, as in the table of `numerics.traced_ops`: its output as `out`, and of `experts` also `each`."""
        layer, op = place
        where = [] if layer is None else [self._model.layers[layer]]
        here = {name: tensor.to(self._device) for name, tensor in inputs.items()}
        # SGLang writes some results into its inputs.
        outputs = {"out": getattr(self, op)(*where, **{name: tensor.clone() for name, tensor in here.items()})}
        if op == "experts":
            outputs["each"] = self._each_expert(*where, **here)
        return outputs

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """The whole forward, op after op."""
        streams, chosen = [], []
        x, residual = self.embed(tokens.to(self._device)), None
        for layer in self._model.layers:
            x, residual = self.input_norm(layer, x, residual).unbind(1)
            streams.append(residual)
            q, k, v = self._split_heads(layer, self.qkv(layer, x))
            q, k = self.rope(layer, self.q_norm(layer, q), self.k_norm(layer, k)).split((q.shape[1], k.shape[1]), 1)
            attended = self.o_proj(layer, self.attention(layer, q, k, v))
            x, residual = self.post_norm(layer, attended, residual).unbind(1)
            if hasattr(layer.mlp, "experts"):
                probs, ids = self._top_k(layer, self.router(layer, x))
                chosen.append(ids.sort(-1).values)
                x = self._routed(layer, x, probs, ids)
            else:
                x = self.down(layer, self.swiglu(layer, self.gate_up(layer, x)))
        logits = self.lm_head(self.final_norm(x, residual)[:, 0])
        found = {"logits": logits, "logprobs": self.logprobs(logits), "stream": torch.stack(streams)}
        return found | ({"chosen": torch.stack(chosen, 1)} if chosen else {})

    def settings(self) -> dict[str, float]:
        attention = self._model.layers[0].self_attn
        return {"rope_theta": float(attention.rotary_emb.base), "norm_eps": self._model.norm.variance_epsilon}

    def embed(self, tokens: Tensor) -> Tensor:
        return self._model.embed_tokens(tokens)

    def input_norm(self, layer: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return _norm(layer.input_layernorm, x, residual)

    def qkv(self, layer: Any, x: Tensor) -> Tensor:
        return layer.self_attn.qkv_proj(x)[0]

    def q_norm(self, layer: Any, x: Tensor) -> Tensor:
        return layer.self_attn.q_norm(x.flatten(0, 1)).view(x.shape)

    def k_norm(self, layer: Any, x: Tensor) -> Tensor:
        return layer.self_attn.k_norm(x.flatten(0, 1)).view(x.shape)

    def rope(self, layer: Any, q: Tensor, k: Tensor) -> Tensor:
        rotated = layer.self_attn.rotary_emb(self._positions, q.flatten(1), k.flatten(1))
        return torch.cat([new.view(old.shape) for new, old in zip(rotated, (q, k), strict=True)], 1)

    def attention(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Prefill of whole sequences; token t lies in slot t of a cache."""
        attn, dtype, lengths = layer.self_attn.attn, self._runner.kv_cache_dtype, self._lengths
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

    def o_proj(self, layer: Any, x: Tensor) -> Tensor:
        return layer.self_attn.o_proj(x)[0]

    def post_norm(self, layer: Any, x: Tensor, residual: Tensor) -> Tensor:
        return _norm(layer.post_attention_layernorm, x, residual)

    def router(self, layer: Any, x: Tensor) -> Tensor:
        return layer.mlp.gate(x)[0]

    def topk(self, layer: Any, logits: Tensor) -> Tensor:
        probs, ids = self._top_k(layer, logits)
        return torch.zeros_like(logits, dtype=torch.float32).scatter(1, ids, probs.float())

    def experts(self, layer: Any, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
        return self._routed(layer, x, probs.gather(1, chosen), chosen)

    def gate_up(self, layer: Any, x: Tensor) -> Tensor:
        return layer.mlp.gate_up_proj(x)[0]

    def swiglu(self, layer: Any, x: Tensor) -> Tensor:
        return layer.mlp.act_fn(x)

    def down(self, layer: Any, x: Tensor) -> Tensor:
        return layer.mlp.down_proj(x)[0]

    def final_norm(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return _norm(self._model.norm, x, residual)

    def lm_head(self, x: Tensor) -> Tensor:
        model = self._runner.model
        return model.logits_processor._compute_lm_head(x, model.lm_head)[:, : model.config.vocab_size]

    def logprobs(self, logits: Tensor) -> Tensor:
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
            vocab_size=logits.shape[1],
            device=str(self._device),
        )
        output = LogitsProcessorOutput(next_token_logits=logits.float().clone())
        targets = [[token] for token in self._targets.tolist()]
        devices = [] if self._device.type == "cpu" else [self._device]
        with torch.random.fork_rng(devices):  # it draws a token, which must not shift the engine's next draws
            self._runner.sampler(output, info, True, [0] * count, targets, self._positions)
        return torch.stack([torch.as_tensor(row)[0] for row in output.next_token_token_ids_logprobs_val]).float()

    def _each_expert(self, layer: Any, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
        """[T, k, H]: what each of a token's experts adds to the output, all others having a weight of zero."""
        weights = probs.gather(1, chosen)
        alone = torch.eye(chosen.shape[1], device=self._device)
        return torch.stack([self._routed(layer, x.clone(), weights * only, chosen) for only in alone], 1)

    def _top_k(self, layer: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        config = layer.mlp.topk.topk_config
        recording, config.allow_routed_experts_capture = config.allow_routed_experts_capture, False
        try:
            output = layer.mlp.topk(logits, logits.clone())
        finally:
            config.allow_routed_experts_capture = recording
        return output.topk_weights, output.topk_ids.long()

    def _routed(self, layer: Any, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        logits = torch.zeros(len(x), layer.mlp.experts.num_experts, device=self._device)
        return layer.mlp.experts(x, StandardTopKOutput(probs.float(), ids.int(), logits))

    def _split_heads(self, layer: Any, qkv: Tensor) -> tuple[Tensor, ...]:
        attention = layer.self_attn
        sizes = (attention.q_size, attention.kv_size, attention.kv_size)
        return tuple(part.reshape(len(qkv), -1, attention.head_dim) for part in qkv.split(sizes, -1))


def _norm(module: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    """[T, 2, H]: normed, and the sum that was normed."""
    if residual is None:
        return torch.stack((module(x.clone()), x), 1)
    return torch.stack(module(x, residual), 1)
