"""A prefill by SGLang's own model classes on their CUDA branches, with the plugin's hooks, on a CPU.

Only for a process in which `as_cuda.pretend` was called first.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8rl.models import Model, read_model
from fp8rl.models.families.latent import Latent
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.plugin import hooks
from fp8rl.rollout.engine.plugin.state import configure, state
from fp8rl.rollout.engine.server.arguments import server_arguments
from fp8rl.weight_sync.served import convert_checkpoint
from tests.support.as_cuda import OnCpu

NUMERICS = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
SLOTS = 64


def first_token(path: Path, folder: Path) -> tuple[int, int]:
    """The likeliest first token of an answer, by SGLang's forward in exact FP8, and by transformers in FP32."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": "6+1+6+6=?"}]
    tokens = torch.tensor(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens[None]).logits[0, -1]
        found = _last_logits(path, folder / path.name, tokens)
    return int(found.argmax()), int(expected.argmax())


def _last_logits(path: Path, served: Path, tokens: torch.Tensor) -> torch.Tensor:
    _hooked()
    convert_checkpoint(path, served, NUMERICS.rollout_spec)
    with OnCpu():
        model, definition = _loaded(served), read_model(served, served=True)
        state().weights.attach(model, definition, "1")
        return _prefilled(model, definition, tokens)


@cache
def _hooked() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    configure(NUMERICS)
    hooks.install(hooks.hooks_for(NUMERICS, True))
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
    return get_model(model_config=model_config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def _prefilled(model: Any, definition: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits after the last of `tokens`, the second request in the table of slots."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    # SGLang's own copy into the cache, which it compiles with nvcc.
    memory_pool.can_use_store_cache = lambda *widths: False  # type: ignore[attr-defined]
    sizes, count = definition.sizes, len(tokens)
    of_pool = (SLOTS, 1, torch.bfloat16)
    if any(isinstance(own, Latent) for own in sizes.own):
        latent = sizes.of(Latent)
        pool = memory_pool.MLATokenToKVPool(
            *of_pool, latent.kv_rank, latent.rope_dim, sizes.layers, "cpu", enable_memory_saver=False
        )
    else:
        pool = memory_pool.MHATokenToKVPool(
            *of_pool, sizes.kv_heads, sizes.head_dim, sizes.layers, "cpu", enable_memory_saver=False
        )
    backend = object.__new__(TritonAttnBackend)  # its constructor asks for a whole runner
    backend.token_to_kv_pool = pool
    backend.forward_metadata = SimpleNamespace(swa_out_cache_loc=None, out_cache_loc_full_physical=None)
    table = torch.arange(SLOTS, dtype=torch.int32).view(2, -1)
    backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=tokens,
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([count]),
        out_cache_loc=table[1, :count].long(),
        seq_lens_sum=count,
        positions=torch.arange(count),
        extend_seq_lens=torch.tensor([count], dtype=torch.int32),
        extend_prefix_lens=torch.tensor([0], dtype=torch.int32),
        extend_seq_lens_cpu=[count],
        extend_prefix_lens_cpu=[0],
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    with forward_context(ForwardContext(attn_backend=backend)):
        return model.forward(batch.input_ids, batch.positions, batch).next_token_logits[0]
