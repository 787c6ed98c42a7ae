"""Show that Qwen3-Next's linear attention has the same bits in SGLang's CPU engine and in a trainer's module.

`python -m lab.studies.prototypes.gated_delta_engine` serves a tiny Qwen3-Next of transformers by SGLang itself, with
this layer in the place of its own: prompts in chunks of 96 beside each other, then single tokens. It keeps what each
layer was given and gave, and compares that with `GatedDeltaNet`, a module of whole sequences, bit for bit. The engine's
log-probabilities stand beside transformers', and the module's gradients beside those of transformers' layer in FP32.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.rollout.server.arguments import server_environment
from lab.studies.prototypes.gated_delta import PIECE, tiny_model
from lab.studies.prototypes.gated_delta_layer import (
    GatedDeltaNet,
    Held,
    Sizes,
    Weights,
    linear_attention,
    of_transformers,
)

PROMPTS, NEW = (330, 150, 70, 5), 40
"""Tokens of each request's prompt, and those that each samples."""
KEPT = "GATED_DELTA_KEPT"
"""The environment variable that names the folder into which the engine writes what its layers saw."""


class EngineLayers:
    """The engine's side: what each sequence has left behind in each layer, by the slot that SGLang gave its states."""

    def __init__(self, folder: Path) -> None:
        self._held: dict[tuple[int, int], Held] = {}
        self._folder, self._calls = folder, 0

    def forward(self, module: Any, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        """`Qwen3GatedDeltaNet.forward`, prefill and decode alike."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        weights, sizes = _of_sglang(module)
        decode = forward_batch.forward_mode.is_decode_or_idle()
        counts = [1] * len(forward_batch.seq_lens) if decode else forward_batch.extend_seq_lens.tolist()
        pool = get_attn_backend().linear_attn_backend.req_to_token_pool
        slots = pool.get_mamba_indices(forward_batch.req_pool_indices).tolist()
        parts = hidden_states.split(counts), forward_batch.positions.split(counts)
        outputs = []
        for slot, x, positions in zip(slots, *parts, strict=True):
            first = int(positions[0])
            held = self._held[module.layer_id, slot] if first else Held.empty(weights, sizes)
            out, self._held[module.layer_id, slot] = linear_attention(x, weights, sizes, held)
            self._keep((module.layer_id, slot, first), x, out)
            outputs.append(out)
        return torch.cat(outputs)

    def _keep(self, where: tuple[int, int, int], x: Tensor, out: Tensor) -> None:
        self._calls += 1
        torch.save((where, x.clone(), out), self._folder / f"{self._calls:06}.pt")


def _of_sglang(module: Any) -> tuple[Weights, Sizes]:
    weights = Weights(
        module.in_proj_qkvz.weight,
        module.in_proj_ba.weight,
        module.conv1d.weight.flatten(1),
        module.A_log,
        module.dt_bias,
        module.norm.weight,
        module.out_proj.weight,
    )
    widths = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
    return weights, Sizes(*widths, module.layer_norm_epsilon)


def _add_older_spellings(path: Path) -> None:
    """transformers 5 writes lists and one place for what SGLang reads as keys of older files."""
    older = {"full_attention_interval": 4, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(json.loads(path.read_text()) | older))


def serve(model: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """SGLang's answers, of an engine in whose linear layers this one stands."""
    _stand_in_for_sgl_kernel()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    layers = EngineLayers(Path(os.environ[KEPT]))

    def forward(self: Any, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        return layers.forward(self, hidden_states, forward_batch)

    def forking(*_: Any) -> None:  # spawned, a scheduler would import SGLang anew and find nothing of ours
        multiprocessing.set_start_method("fork", force=True)

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", forking, HookType.AFTER)
    target = "sglang.srt.models.qwen3_next.Qwen3GatedDeltaNet.forward"
    HookRegistry.register(target, forward, HookType.REPLACE)
    HookRegistry.register("sglang.srt.models.qwen2_moe.fused_gate_sigmoid_mul_add", add_gated, HookType.REPLACE)
    load_plugins()
    import sglang

    engine = sglang.Engine(
        model_path=str(model),
        dtype="bfloat16",
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
        context_length=512,
        max_total_tokens=4096,
        max_running_requests=8,
        chunked_prefill_size=PIECE,
        random_seed=0,
        log_level="error",
    )
    try:
        options = {"max_new_tokens": NEW, "temperature": 1.0, "ignore_eos": True}
        return list(engine.generate(input_ids=prompts, sampling_params=options, return_logprob=True))
    finally:
        engine.shutdown()


def add_gated(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor) -> None:
    """Stand in for the Triton kernel of the shared expert: its gate's part of it is added to the others' result."""
    final_hidden_states += ops.linear(hidden_states, gate_weight[None]).sigmoid() * shared_output


def _stand_in_for_sgl_kernel() -> None:
    """SGLang's backend of linear attention imports three names of a package that has them for CPUs with AMX."""
    mamba = ModuleType("sgl_kernel.mamba")
    for name in ("causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"):
        setattr(mamba, name, None)
    sys.modules["sgl_kernel.mamba"] = mamba
    for name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu", "chunk_gated_delta_rule_cpu"):
        torch.library.define(f"sgl_kernel::{name}", "(Tensor x) -> Tensor")


def main() -> None:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 128, (length,), generator=draw).tolist() for length in PROMPTS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, kept = folder / "model", folder / "kept"
        kept.mkdir()
        tiny_model().to(torch.bfloat16).save_pretrained(model)
        _add_older_spellings(model / "config.json")
        os.environ.update(server_environment(None, folder, cuda=False) | {KEPT: str(kept)})
        answers = serve(model, prompts)
        _compare_layers(model, kept)
        _compare_logprobs(model, prompts, answers)
        _compare_gradients(model)


def _compare_layers(model: Path, kept: Path) -> None:
    """Each layer and sequence of the engine beside the module, which is given all of its rows at once."""
    seen: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = defaultdict(list)
    for path in sorted(kept.iterdir()):
        (layer, slot, first), x, out = torch.load(path, weights_only=True)
        seen[layer, slot].append((first, x, out))
    theirs = _transformers(model, torch.bfloat16).model.layers
    for (layer, slot), calls in sorted(seen.items()):
        xs, outs = torch.cat([x for _, x, _ in calls]), torch.cat([out for _, _, out in calls])
        assert [first for first, _, _ in calls] == [sum(len(x) for _, x, _ in calls[:i]) for i in range(len(calls))]
        module = GatedDeltaNet(*of_transformers(theirs[layer].linear_attn))
        found = module(xs)
        pieces = [len(x) for _, x, _ in calls]
        singles = sum(count == 1 for count in pieces)
        print(
            f"layer {layer}, slot {slot}: {len(xs)} tokens as {[p for p in pieces if p > 1]} and {singles} alone: "
            f"{int((found != outs).sum())} of {outs.numel()} values differ"
        )


def _compare_logprobs(model: Path, prompts: list[list[int]], answers: list[dict[str, Any]]) -> None:
    theirs, rounded = _transformers(model, torch.float32), _transformers(model, torch.bfloat16)
    apart: dict[str, list[float]] = defaultdict(list)
    for prompt, answer in zip(prompts, answers, strict=True):
        said = [(token, logprob) for logprob, token, *_ in answer["meta_info"]["output_token_logprobs"]]
        tokens = torch.tensor([prompt + [token for token, _ in said]])
        with torch.no_grad():
            exact, bf16 = (each(tokens).logits.float().log_softmax(-1)[0] for each in (theirs, rounded))
        for place, (token, logprob) in enumerate(said, start=len(prompt) - 1):
            apart["the engine"].append(abs(float(exact[place, token]) - logprob))
            apart["transformers in BF16"].append(abs(float(exact[place, token] - bf16[place, token])))
    for side, each in apart.items():
        mean = sum(each) / len(each)
        print(
            f"log-probabilities of {len(each)} sampled tokens, {side} beside transformers in FP32: mean |d| {mean:.3f}"
        )


def _compare_gradients(model: Path) -> None:
    module = GatedDeltaNet(*of_transformers(_transformers(model, torch.bfloat16).model.layers[0].linear_attn))
    theirs = _transformers(model, torch.float32).model.layers[0].linear_attn
    draw = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(PROMPTS[0], theirs.hidden_size, generator=draw).bfloat16() for _ in range(2))
    module(x).backward(weight)
    theirs(x.float()[None]).backward(weight.float()[None])
    right = {name.removesuffix(".weight"): each.grad for name, each in theirs.named_parameters()}
    errors = {name: each.grad.float() - right[name].view_as(each) for name, each in module.held.items()}
    relative = {name: float(error.norm() / right[name].norm()) for name, error in errors.items()}
    print("gradients beside transformers': " + ", ".join(f"{name} {error:.1e}" for name, error in relative.items()))


def _transformers(model: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


if __name__ == "__main__":
    main()
