"""Bytes that an SGLang engine (0.5.19) takes of a GPU beside weights and keys and values.

SGLang fills a part of the GPU, its `mem_fraction_static`, with weights and cache, and wants to find the rest of it
free when it sizes the cache: for the activations of a prefill, and for CUDA graphs. Unless the fraction is given,
it follows from the longest prefill chunk and the largest graph (`sglang/srt/arg_groups/memory_hook.py`, whose
figures these are).
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8rl.models.shape import Shape
from fp8rl.rollout.config import RolloutSection

_MIB, _GIB = 2**20, 2**30
_SMALL, _LARGE = 60 * _GIB, 160 * _GIB
_LEAST_CHUNK, _CHUNK_MIB, _CONSTANT_MIB, _GRAPH_MIB, _FLOOR_MIB = 2048, 1.5, 512, 2.0, 10 * 1024


@dataclass(frozen=True)
class EngineRoom:
    """Bytes of one rank of an engine."""

    graphs: float
    """Bytes of its CUDA graphs."""
    working: float
    """Bytes that it wants to find free beside them."""


def engine_room(config: RolloutSection, gpu_memory: float) -> EngineRoom:
    """Return what an engine wants on a GPU of so many bytes."""
    graphs = _GRAPH_MIB * _MIB * max(config.graphs)
    chunk = max(_LEAST_CHUNK, config.chunked_prefill_size or (16384 if gpu_memory >= _LARGE else 8192))  # its own
    wanted = (_CONSTANT_MIB + chunk * _CHUNK_MIB + config.tp / 8 * 1024) * _MIB + graphs
    if gpu_memory > _SMALL:
        wanted = max(wanted, _FLOOR_MIB * _MIB)
    if config.memory_fraction is not None:
        wanted = gpu_memory * (1 - config.memory_fraction)
    return EngineRoom(graphs, max(0.0, wanted - graphs))


_SMS, _LEAN_ROWS = 132, 16  # of a Hopper GPU; of SGLang's `_LEAN_BLOCK_M`


def graph_buffers(config: RolloutSection, shape: Shape) -> float:
    """Return the bytes of what SGLang allocates for its CUDA graphs outside the regions that sleep, on one rank.

    For each answer of the largest graph: logits in FP32, the slots of its context, and the workspace of one split of
    keys (`TritonAttnBackend.init_cuda_graph_state`, `GraphSharedOutput`), which exact mode's attention does not use.
    """
    sizes, batch = shape.sizes, max(config.graphs)
    value = max(family.value(sizes) for family, _ in shape.layers_of())
    of_answer = 4 * sizes.heads // config.tp * (value + 1) + 8 * config.context_length + 4 * sizes.vocab_size
    return float(batch * of_answer + 4 * _SMS * _LEAN_ROWS * (value + 2))
