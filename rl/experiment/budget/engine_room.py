"""What an SGLang engine (0.5.19) takes of a GPU beside weights and keys and values.

SGLang fills a part of the GPU, its `mem_fraction_static`, with weights and cache, and wants to find the rest of it free
when it sizes the cache: for the activations of a prefill, and for CUDA graphs. Unless the fraction is given, it follows
from the longest prefill chunk and the largest graph (`sglang/srt/arg_groups/memory_hook.py`, whose figures these are).
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8rl.rollout.config import RolloutConfig

_MIB, _GIB = 2**20, 2**30
CONTEXT_BYTES = 450 * _MIB
"""Bytes of a CUDA context of a process that maps memory of a GPU on which it computes nothing. Assumed."""
_SMALL, _LARGE = 60 * _GIB, 160 * _GIB
_LEAST_CHUNK, _CHUNK_MIB, _CONSTANT_MIB, _GRAPH_MIB, _FLOOR_MIB = 2048, 1.5, 512, 2.0, 10 * 1024


@dataclass(frozen=True)
class EngineRoom:
    """Bytes of one rank of an engine. graphs: of its CUDA graphs. working: that it wants to find free beside them."""

    graphs: float
    working: float


def engine_room(config: RolloutConfig, gpu_memory: float) -> EngineRoom:
    """What an engine wants on a GPU of so many bytes."""
    graphs = _GRAPH_MIB * _MIB * largest_graph(config, gpu_memory)
    chunk = max(_LEAST_CHUNK, config.chunked_prefill_size or _chunk(gpu_memory))
    wanted = (_CONSTANT_MIB + chunk * _CHUNK_MIB + config.tp / 8 * 1024) * _MIB + graphs
    if gpu_memory > _SMALL:
        wanted = max(wanted, _FLOOR_MIB * _MIB)
    if config.memory_fraction is not None:
        wanted = gpu_memory * (1 - config.memory_fraction)
    return EngineRoom(graphs, max(0.0, wanted - graphs))


def largest_graph(config: RolloutConfig, gpu_memory: float) -> int:
    """Answers in the largest CUDA graph of a decode step."""
    if config.graph_batches:
        return max(config.graph_batches)
    return 512 if config.tp >= 4 or gpu_memory >= _LARGE else 256


def _chunk(gpu_memory: float) -> int:
    """SGLang's own chunk of a prefill on GPUs of 60 GiB and more, the smallest that are planned for."""
    return 16384 if gpu_memory >= _LARGE else 8192
