"""Hooks around SGLang's life: the model is loaded, weights are updated, somebody asks what is installed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from numerics.compiler import enable_compiler
from rollout.handshake import REPORT_KEY
from rollout.plugin import op_probe
from rollout.plugin.engine import report, state

# SGLang passes the action of /weights_checker through as text; these two are ours, and `op_probe.OPS`.
COMMIT = "fp8rl.commit:"
MANIFEST = "fp8rl.manifest"


def after_load_model(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`ModelRunner.load_model`: take charge of the weights that it loaded."""
    enable_compiler()
    state().weights.attach(self.model, self.server_args.weight_version)


def before_update(*args: Any, **kwargs: Any) -> None:
    """Every way in which SGLang writes weights while it serves."""
    state().weights.invalidate()


def check_weights(original: Any, self: Any, action: str, allow_quant_error: bool = False) -> Any:
    """`ModelRunner.check_weights`: commit an update, read the manifest or probe the ops, in SGLang's form of an answer.

    The checksums are the manifest, or the digest of the file that answers the probe.
    """
    if action.startswith(COMMIT):
        manifest = state().weights.commit(action.removeprefix(COMMIT))
    elif action == MANIFEST:
        manifest = state().weights.manifest()
    elif action.startswith(op_probe.OPS):
        recording = Path(action.removeprefix(op_probe.OPS))
        manifest = {op_probe.ANSWER: op_probe.answer(self, recording)}
    else:
        return original(self, action=action, allow_quant_error=allow_quant_error)
    whole = hashlib.sha256(repr(sorted(manifest.items())).encode()).hexdigest()
    ranks = ("tp_rank", "dp_rank", "pp_rank", "rank")
    sizes = ("tp_size", "dp_size", "pp_size", "size")
    parallelism = {**dict.fromkeys(ranks, 0), **dict.fromkeys(sizes, 1)}
    return {"checksums": manifest, "per_gpu_checksum": whole, "parallelism_info": parallelism}


def after_get_internal_state(result: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`Scheduler.get_internal_state`: the report goes out with the engine's own."""
    result.internal_state[REPORT_KEY] = report()
    return result


def after_sampler_init(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`Sampler.__init__`: logprobs are log_softmax(logits / temperature), as `ops.token_logprobs` defines them.

    The stock path takes log(softmax(.)), which differs by an ulp. The flag changes nothing else in the sampler.
    """
    self.enable_deterministic = True


def after_prompt_scorer_init(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`InputLogprobProcessor.__init__`: logprobs of given tokens are log_softmax(logits) too.

    The stock path subtracts a separate log-sum-exp, which differs by an ulp.
    """
    self.enable_fast_input_logprobs = False


def make_host_cache(self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """`BaseHostCache.__init__`: routed experts, kept by KV slot.

    Without pinned memory, which needs CUDA, and with -1, which is no expert, where nothing was recorded.
    """
    self.buffer = torch.full((num_tokens, num_layers, topk_size), -1, dtype=torch.int32)
    self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name
    self._log_allocation()


def no_repacking(self: Any, layer: Any) -> None:
    """FP8 weights stay as they are in the checkpoint, so that what is served can be compared byte for byte."""
