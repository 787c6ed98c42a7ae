"""Hooks that let an engine give up weights, KV cache and CUDA graphs, and take the room back before a sync fills it.

On a GPU torch_memory_saver, which SGLang asks, unmaps the memory behind tensors whose addresses stay. Where there is
none, on a CPU, this frees the memory of weights and cache. Either way nothing of what was there comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import psutil
import torch
from torch import Tensor

from fp8rl.numerics.core.memory import give_back
from fp8rl.rollout.engine.plugin.state import cache_buffers, state, state_buffers
from fp8rl.rollout.engine.protocol import CACHE, RELEASED, WEIGHTS, Memory


def release(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """`SchedulerWeightUpdaterManager.release_memory_occupation` of a paused engine. What is gone already is left out.

    SGLang dies of a request that waits. One that holds no KV cache may: its prefix is prefilled once the engine wakes.
    """
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    recv_req.tags = [tag for tag in recv_req.tags or RELEASED if tag not in self.offload_tags]
    if not recv_req.tags:
        return ReleaseMemoryOccupationReqOutput()
    if WEIGHTS in recv_req.tags:
        state().weights.release()
    waiting = self.scheduler.waiting_queue
    if not any(request.kv.holds_kv for request in waiting):
        self.scheduler.waiting_queue = []
    try:
        answer = original(self, recv_req)
    finally:
        self.scheduler.waiting_queue = waiting
    saved, runner = self.memory_saver_adapter.enabled, self.tp_worker.model_runner
    for tag in recv_req.tags:
        state().released[tag] = [] if saved else freed(_tensors(runner, tag))
    if not saved:
        give_back()
    return answer


def resume(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """`SchedulerWeightUpdaterManager.resume_memory_occupation`. What is there already is left out.

    The cache begins with zeros, as when the engine starts: what a masked key holds counts nothing, if it is finite, and
    the rows that pad a CUDA graph's batch have to name slots that are there.
    """
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    recv_req.tags = [tag for tag in recv_req.tags or RELEASED if tag in self.offload_tags]
    if not recv_req.tags:
        return ResumeMemoryOccupationReqOutput()
    for tag in recv_req.tags:
        for storage, size in state().released.pop(tag):
            storage.resize_(size)
    answer = original(self, recv_req)
    if CACHE in recv_req.tags:
        runner = self.tp_worker.model_runner
        runner.req_to_token_pool.req_to_token.zero_()
        for buffer in _tensors(runner, CACHE):
            buffer.zero_()
    if WEIGHTS in recv_req.tags:
        state().weights.occupy()
    capture_again(self.tp_worker.model_runner)
    return answer


def capture_again(runner: Any) -> None:
    """Capture an engine's CUDA graphs anew if its weights lie in other memory than when they were captured.

    A capture runs the model: it waits until the weights are committed, and all that the engine gave up is there again.
    """
    weights = state().weights
    if weights.moved and weights.version is not None and not state().released and weights.device.type == "cuda":
        runner.init_decode_cuda_graph()
        weights.moved = False


def freed(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Free the memory of these; what was freed, and how many bytes it had."""
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if size := storage.nbytes():  # several tensors may share it
            found.append((storage, size))
            storage.resize_(0)
    return found


def memory(runner: Any) -> Memory:
    """Return what a rank of the engine holds. runner: SGLang's ModelRunner.

    CUDA graphs, of which torch knows no size, count in `in_use` alone.
    """
    device, held = state().weights.device, dict.fromkeys((WEIGHTS, CACHE), 0)
    for tag in held.keys() - state().released.keys():
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _tensors(runner, tag)}
        held[tag] = sum(storage.nbytes() for storage in storages.values())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(in_use=total - free, **held)
    give_back()  # what was freed is nobody's
    return Memory(in_use=psutil.Process().memory_info().rss, **held)


def _tensors(runner: Any, tag: str) -> Iterator[Tensor]:
    if tag == WEIGHTS:
        yield from state().weights.everything()
    elif tag == CACHE:
        yield from (buffer for _, buffer in chain(cache_buffers(runner), state_buffers(runner)))


# Hooks that make a pause safe for an update of the weights, and put its idle time to use.
#
# `/pause_generation {"mode": "retract"}` frees the KV cache of every running request and puts it back into the
# scheduler's queue, tokens and log-probabilities kept; resumed, its prefix is prefilled anew, under the weights of
# then.


def flush_cache(original: Callable[..., bool], self: Any, empty_cache: bool = True) -> bool:
    """`Scheduler.flush_cache`: while paused, requests that wait without any KV cache do not stand in its way.

    The radix tree still holds prefixes of the old weights, and SGLang 0.5.19 refuses to flush while a request waits, or
    dies of it within an update. Its own test of everything else (nothing runs, no chunk is under way) still counts.
    """
    if not self._engine_paused or any(request.kv.holds_kv for request in self.waiting_queue):
        return original(self, empty_cache)
    waiting, self.waiting_queue = self.waiting_queue, []
    try:
        return original(self, empty_cache)
    finally:
        self.waiting_queue = waiting


def process_input_requests(result: None, self: Any, recv_reqs: list[Any]) -> None:
    """`Scheduler.process_input_requests`: a paused scheduler prepares the weights that have come, and then waits for
    the next message instead of burning a core.

    It waits only where the server was started with `--sleep-on-idle`, as on a CPU; elsewhere that call does nothing.
    """
    if self._engine_paused and not recv_reqs:
        state().weights.prepare()
        self.maybe_sleep_on_idle()
