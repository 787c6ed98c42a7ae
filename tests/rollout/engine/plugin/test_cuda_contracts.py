"""What the GPU path takes for granted of SGLang on CUDA, read from its sources, since none of it runs on a CPU."""

from __future__ import annotations

import inspect
import pkgutil
import re

import pytest

CONTRACTS = {
    "a batch runs twice before its graph is captured, so that operands are made outside of it": (
        "model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.capture_one",
        "for _ in range(2): self._device_module.synchronize() self._tp_group.barrier() forward_fn()",
    ),
    "weights are loaded in a region of the memory saver, without a copy on the host unless asked for": (
        "model_executor.model_runner_components.load_model_utils.load_model_with_memory_saver",
        "with memory_saver_adapter.region( GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=enable_cpu_backup, ):",
    ),
    "so is the table of the cache's slots, whose first row pads a graph's batch": (
        "mem_cache.memory_pool.ReqToTokenPool.__init__",
        "with memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE): self.req_to_token = torch.zeros(",
    ),
    "each tag is paused, and the cache flushed": (
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation",
        "self.memory_saver_adapter.pause(GPU_MEMORY_TYPE_KV_CACHE) self.flush_cache()",
    ),
    "a tag that was not released must not be resumed": (
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.resume_memory_occupation",
        "for tag in tags: self.offload_tags.remove(tag)",
    ),
    "buffers of the model come back with the weights' memory": (
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.resume_memory_occupation",
        "self.memory_saver_adapter.resume(GPU_MEMORY_TYPE_WEIGHTS) torch.distributed.barrier(self.tp_cpu_group)"
        " _import_static_state(",
    ),
    "one tile of keys as long as the context leaves one split of SGLang's own decode kernel": (
        "layers.attention.triton_backend.TritonAttnBackend.__init__",
        "if self.split_tile_size is not None: self.max_kv_splits = ("
        " self.max_context_len + self.split_tile_size - 1 ) // self.split_tile_size",
    ),
    "states of sequences are in the region of the KV cache": (
        "mem_cache.memory_pool.MambaPool.__init__",
        "self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE),",
    ),
    "sequences that pad a graph's batch have no slot": (
        "layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase._replay_metadata",
        "mamba_indices[bs - num_padding :] = -1",
    ),
    "states that are not taken out of SGLang's kernels are copied between batches, which do not overlap": (
        "arg_groups.overrides._mamba_radix_cache_resolution",
        'declared["mamba_radix_cache_strategy"] = "no_buffer" declared["disable_overlap_schedule"] = True',
    ),
}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_sglang_keeps_what_the_gpu_path_takes_for_granted(contract: str) -> None:
    target, expected = CONTRACTS[contract]
    source = inspect.getsource(pkgutil.resolve_name(f"sglang.srt.{target}"))
    assert expected in re.sub(r"\s+", " ", re.sub(r"#.*", "", source))


def test_an_engine_gives_up_all_that_sglang_can_release() -> None:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    from fp8rl.rollout.engine.protocol import RELEASED

    assert set(RELEASED) == set(GPU_MEMORY_ALL_TYPES)
