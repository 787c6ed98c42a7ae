"""Forwards by the program within SGLang as on a GPU, on a CPU.

Only for a process in which `as_cuda.pretend` was called first.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8rl.models import Model, read_model
from fp8rl.models.families.gated_delta import GatedDelta
from fp8rl.models.families.latent import Latent
from fp8rl.models.program import LOGITS, TOKENS, run
from fp8rl.numerics.config import KVPrecision, NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.plugin import hooks
from fp8rl.rollout.engine.plugin.lifecycle import after_load_model
from fp8rl.rollout.engine.plugin.state import configure
from fp8rl.rollout.engine.plugin.tokens import Recorded
from fp8rl.rollout.engine.server.arguments import server_arguments
from fp8rl.weight_sync.served import convert_checkpoint
from tests.support.as_cuda import OnCpu, called

SLOTS = 64
_installed: set[str] = set()


def engine_paths(path: Path, folder: Path, kv: KVPrecision = "bf16") -> dict[str, Any]:
    """Compare the logits behind a prompt, in exact FP8: of a prefill, of the program that is not lowered, and of a step
    that decodes the prompt's last token, plain and as a CUDA graph is captured.

    called: stubs; differ: what has other bits than the prefill; token, expected: the likeliest next one, and
    the same by transformers in FP32.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": "6+1+6+6=?"}]
    tokens = torch.tensor(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"), kv=kv)
    _hook(numerics)
    served = folder / path.name
    if not served.exists():
        convert_checkpoint(path, served, numerics.rollout_spec)
    called.clear()
    with OnCpu(), torch.no_grad():
        model, definition = _loaded(served), read_model(served, served=True)
        forward = _forward(model, definition, numerics)
        whole = forward(tokens, 0)
        steps: dict[bool | str, torch.Tensor] = {}
        for capture in (False, True):
            forward = _forward(model, definition, numerics)
            forward(tokens[:-1], 0)
            steps[capture] = forward(tokens[-1:], len(tokens) - 1, decode=True, capture=capture)
        model.tokens = Recorded(torch.tensor([len(tokens)]), tokens, 1.0)
        steps["as it is"] = run(definition.forward.sites(), model, {TOKENS: tokens})[LOGITS][-1].float()
        stubs = list(called)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens[None]).logits[0, -1]
    return {
        "called": stubs,
        "differ": [f"capture={capture}" for capture, logits in steps.items() if not torch.equal(logits, whole)],
        "finite": bool(whole.isfinite().all()), "token": int(whole.argmax()), "expected": int(expected.argmax()),
    }  # fmt: skip


def _hook(numerics: NumericsConfig) -> None:
    """Configure the process, and install those of the hooks that it does not have yet."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    configure(numerics)
    every = hooks.hooks_for(numerics, True)
    hooks.register([hook for hook in every if hook.path not in _installed])
    _installed.update(hook.path for hook in every)
    HookRegistry.apply_hooks()


@cache
def _one_rank(folder: Path) -> None:
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel

    init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
    initialize_model_parallel(1)


def _loaded(served: Path) -> Any:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model
    from sglang.srt.server_args import prepare_server_args, set_global_server_args_for_scheduler

    config = RolloutSection(context_length=SLOTS, max_total_tokens=SLOTS)
    args = prepare_server_args(server_arguments(served, config, port=1, weight_version=1, cuda=True, mode="exact"))
    set_global_server_args_for_scheduler(args)
    _one_rank(served.parent)
    model_config = ModelConfig.from_server_args(args)
    model = get_model(model_config=model_config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    after_load_model(SimpleNamespace(model=model, server_args=args, ps=SimpleNamespace(tp_rank=0, tp_size=1)))
    return model


def _forward(model: Any, definition: Model, numerics: NumericsConfig) -> Callable[..., torch.Tensor]:
    """A call that gives the logits behind the last of `tokens`, which follow `start` others of the second request in an
    empty cache."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.model_executor.runner_utils import capture_mode

    table = torch.arange(SLOTS, dtype=torch.int32).view(2, -1)
    backend = object.__new__(TritonAttnBackend)  # its constructor asks for a whole runner
    backend.token_to_kv_pool = _cache(definition, numerics)
    backend.forward_metadata = SimpleNamespace(swa_out_cache_loc=None, out_cache_loc_full_physical=None)
    backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    backend.linear_attn_backend = _states(definition)

    def forward(tokens: torch.Tensor, start: int, decode: bool = False, capture: bool = False) -> torch.Tensor:
        count = len(tokens)
        extended = {
            "extend_seq_lens": torch.tensor([count], dtype=torch.int32),
            "extend_prefix_lens": torch.tensor([start], dtype=torch.int32), "extend_seq_lens_cpu": [count],
            "extend_prefix_lens_cpu": [start],
        }  # fmt: skip
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND, batch_size=1, input_ids=tokens,
            req_pool_indices=torch.tensor([1]), seq_lens=torch.tensor([start + count]),
            out_cache_loc=table[1, start : start + count].long(), seq_lens_sum=start + count,
            positions=torch.arange(start, start + count), capture_hidden_mode=CaptureHiddenMode.NULL,
            **{} if decode else extended,
        )  # fmt: skip
        capture_mode.is_capture_mode = capture
        try:
            with forward_context(ForwardContext(attn_backend=backend)):
                return model.forward(batch.input_ids, batch.positions, batch).next_token_logits[-1]
        finally:
            capture_mode.is_capture_mode = False

    return forward


def _cache(definition: Model, numerics: NumericsConfig) -> Any:
    from sglang.srt.mem_cache import memory_pool

    # SGLang's own copy into the cache, which it compiles with nvcc.
    memory_pool.can_use_store_cache = lambda *widths: False  # type: ignore[attr-defined]
    sizes = definition.sizes
    of_pool = (SLOTS, 1, numerics.kv_format.dtype)
    if any(isinstance(own, Latent) for own in sizes.own):
        latent = sizes.of(Latent)
        return memory_pool.MLATokenToKVPool(
            *of_pool, latent.kv_rank, latent.rope_dim, sizes.layers, "cpu", enable_memory_saver=False
        )
    return memory_pool.MHATokenToKVPool(
        *of_pool, sizes.kv_heads, sizes.head_dim, sizes.layers, "cpu", enable_memory_saver=False
    )


def _states(definition: Model) -> Any:
    """A stand-in for the pool of linear attention's states, empty."""
    own = next((each for each in definition.sizes.own if isinstance(each, GatedDelta)), None)
    if own is None:
        return None
    layers = [
        SimpleNamespace(
            conv=[torch.zeros(3, own.channels, own.taps - 1, dtype=torch.bfloat16)],
            temporal=torch.zeros(3, own.value_heads, own.value_dim, own.key_dim),
        )
        for _ in range(definition.sizes.layers)
    ]
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(mamba2_layer_cache=lambda layer: layers[layer]),
        forward_metadata=SimpleNamespace(mamba_cache_indices=torch.tensor([1], dtype=torch.int32)),
    )
