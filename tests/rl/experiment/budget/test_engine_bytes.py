"""Planned bytes of an engine of latent attention against those that SGLang's classes allocate on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8rl.models import read_shape
from fp8rl.models.families.latent import Latent
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.experiment.budget.job import Job, job_of
from fp8rl.rl.experiment.budget.memory import colocated_memory, engine_memory
from tests.support.paths import CONFIGS, EXAMPLES

CONTEXT, TOKENS, GPU = 8192, 200_000, 139 << 30


def bytes_of(value: Any) -> int:
    """Of all tensors in an object's attributes, and in lists there."""
    listed = (each if isinstance(each, list) else [each] for each in vars(value).values())
    tensors = (tensor for each in listed for tensor in each if isinstance(tensor, torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors)


def job(model: str, tp: int = 1, kv: str = "bf16") -> Job:
    sizes = f"rollout.context_length={CONTEXT}", f"rollout.max_total_tokens={TOKENS}", f"rollout.tp={tp}"
    overrides = [f"model.path={CONFIGS / model}", f"numerics.kv={kv}", *sizes]
    spec = load_experiment(EXAMPLES / "arithmetic.yaml", overrides)
    return job_of(spec, read_shape(Path(spec.model.path)), "kernels", GPU)


@pytest.mark.parametrize(
    ("model", "tp", "kv"), [("moonlight_16b_a3b", 1, "bf16"), ("glm_4_7_flash", 1, "fp8"), ("deepseek_v3", 8, "bf16")]
)
def test_sglang_allocates_what_is_planned(model: str, tp: int, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput

    planned = job(model, tp, kv)
    sizes, own = planned.shape.sizes, planned.shape.sizes.of(Latent)
    form, of_latent = planned.numerics.kv_format.dtype, (own.kv_rank, own.rope_dim, sizes.layers)
    pool = MLATokenToKVPool(TOKENS, 1, form, *of_latent, "meta", enable_memory_saver=False)
    batch = 256
    output = GraphSharedOutput(device=torch.device("meta"), max_rows=batch)
    output.get_logits_buffer(sizes.vocab_size, rows=batch)
    settings = {"num_head": sizes.heads // tp, "v_head_dim": own.kv_rank, "max_context_len": CONTEXT}
    settings |= {"lean_total_programs": 132, "lean_block_m": 16, "num_draft_tokens": 0, "skip_prefill": True}
    settings |= {"max_kv_splits": 1} | dict.fromkeys(("is_draft_runner", "use_sliding_window_kv_pool"), False)
    settings |= dict.fromkeys(("swa_v_head_dim", "sliding_window_size"))
    translator = SimpleNamespace(is_translating=False, make_capture_tables=lambda **_: None)
    backend = SimpleNamespace(device="meta", kv_index_translator=translator, **settings)
    allocate: Callable[..., None] = TritonAttnBackend.init_cuda_graph_state
    monkeypatch.setattr(
        "sglang.srt.layers.attention.triton_backend.maybe_create_verify_mask", lambda **_: None, raising=False
    )
    allocate(backend, batch, batch)
    logits = sum(buffer.nbytes for buffer in output._logits_buffers.values())
    allocated = bytes_of(pool) + bytes_of(backend) + logits
    classes = engine_memory(planned).held
    found = classes["KV cache"]["rollout"] + classes["engine buffers"]["rollout"]
    assert found == pytest.approx(allocated, rel=0.05)
    assert classes["engine buffers"]["rollout"] == pytest.approx(bytes_of(backend) + logits, rel=0.05)


def test_a_sleeping_engine_keeps_its_buffers() -> None:
    asleep = colocated_memory(replace(job("moonlight_16b_a3b"), sleep=True)).held
    buffers = asleep["engine buffers"]
    assert buffers["train"] == buffers["rollout"] > 0
    assert "train" not in asleep["KV cache"] and "train" not in asleep["CUDA graphs"]
