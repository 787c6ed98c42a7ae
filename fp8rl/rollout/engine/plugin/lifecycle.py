"""Hooks on events in an engine: it loads its model, updates weights, sleeps and wakes, and answers its owner."""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from fp8rl.models import read_model
from fp8rl.models.shared_base import SharedBase, parameter_spans
from fp8rl.models.tensors import EngineRank
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.backend.implementation import choose
from fp8rl.numerics.core.memory import ZEROS, give_back, mapped, placeholders
from fp8rl.numerics.probe import choose_deepgemm, choose_tiles
from fp8rl.rollout.engine.plugin import op_probe
from fp8rl.rollout.engine.plugin.parameters import AdaptedRows
from fp8rl.rollout.engine.plugin.state import cache_buffers, inventory, report, state
from fp8rl.rollout.engine.plugin.weights import ServedWeights
from fp8rl.rollout.engine.protocol import CACHE, RELEASED, WEIGHTS, Memory, from_action, to_checksums


def load_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ModelRunner.load_model`: load placeholders if the engine waits for a base, then `after_load_model`."""
    waits = state().waits
    if waits and (found := self.server_args.load_format) != "dummy":
        raise RuntimeError(
            f"fp8rl plugin: found load_format {found} for an engine that reads its weights from a base, expected "
            "dummy. Start it from a directory without weights"
        )
    with placeholders(ZEROS) if waits else nullcontext():
        result = original(self, *args, **kwargs)
    after_load_model(self)
    return result


def after_load_model(self: Any) -> None:
    """Choose the implementation of the ops, and take over the loaded model's weights. self: the ModelRunner."""
    current = state()
    device = next(self.model.parameters()).device
    current.implementation = choose(device, current.numerics.spec)
    if current.implementation == "torch":
        if device.type != "cpu" and current.numerics.mode == "exact":
            raise RuntimeError(
                f"fp8rl plugin: found {torch.cuda.get_device_name(device)} and the spec {current.numerics.spec}, "
                "expected a data-centre GPU that converts to FP8, weights in blocks of 128, and activations and "
                "gradients in token groups of 128, because exact ops have CUDA kernels only for these. Set "
                "numerics.mode to native"
            )
        enable_compiler()
    if current.numerics.mode == "exact":
        definition = self.model.definition
        choose_tiles(device)
        current.without_deepgemm = choose_deepgemm(device, current.numerics.deepgemm)
    else:
        definition = read_model(Path(self.server_args.model_path), served=True)
        for name, module in self.model.named_modules():
            if name.endswith(".topk") and module.layer_id is None:  # SGLang's OLMoE leaves it out
                module.layer_id = int(name.split(".")[-3])  # by which the router's choice is kept for replay
    rank = EngineRank(self.ps.tp_rank, self.ps.tp_size)
    of_base = parameter_spans(definition, current.numerics.rollout_spec) if current.waits else ()
    rows = AdaptedRows(self.server_args.max_total_tokens, device) if current.base_name is not None else None
    spec, version = current.numerics.rollout_spec.weight, self.server_args.weight_version
    current.weights = ServedWeights(spec, self.model, definition, version, rank, of_base, rows)
    self.model.load_weights = functools.partial(current.weights.load, self.model.load_weights)


def unpadded(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Replaces `adjust_config_with_unaligned_cpu_tp`. It does not pad experts, because a rank has whole experts.

    It still sets the numbers of heads, because some models read them on a CPU.
    """
    from sglang.srt.configs.update_config import adjust_tp_num_heads_if_necessary

    adjust_tp_num_heads_if_necessary(model_config.hf_text_config, tp_size, True)
    return model_config


def before_forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """Before `ModelRunner.forward`: check that weights are committed (CUDA graphs cannot), and mark adapted rows."""
    state().weights.check()
    if (rows := state().weights.adapted_rows) is not None:
        rows.take(forward_batch)


def before_update(*args: Any, **kwargs: Any) -> None:
    """Before whatever writes weights while the engine serves: note that the weights change."""
    state().weights.invalidate()


def check_weights(original: Any, self: Any, action: str, allow_quant_error: bool = False) -> Any:
    """Around `ModelRunner.check_weights`: answer a call of the engine's owner (`CALLS`), in SGLang's form."""
    if (call := from_action(action)) is None:
        return original(self, action=action, allow_quant_error=allow_quant_error)
    name, arguments = call
    try:
        answer = to_checksums(CALLS[name](self, **arguments))
    except Exception as error:  # the other ranks of the engine wait for this rank's answer
        traceback.print_exc()
        answer = to_checksums(error)
    engine = state().weights.rank
    parallelism = {"tp_rank": engine.rank, "tp_size": engine.ranks, "rank": engine.rank, "size": engine.ranks}
    parallelism |= {"dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
    return {"checksums": answer, "per_gpu_checksum": "", "parallelism_info": parallelism}


def load_bucket(runner: Any, addresses: Sequence[str], tensors: Sequence[Sequence[Any]]) -> None:
    """Load tensors from the memory at this rank's address (`server.client.EngineClient.load_bucket`)."""
    _load(runner, mapped(addresses[state().weights.rank.rank]), tensors)


def receive_bucket(runner: Any, group: str, size: int, tensors: Sequence[Sequence[Any]]) -> None:
    """Load tensors from a broadcast in a group (`server.client.EngineClient.receive_bucket`)."""
    flat = torch.empty(size, dtype=torch.uint8, device=state().weights.device)
    torch.distributed.broadcast(flat, 0, runner.weight_updater._model_update_group[group])
    _load(runner, flat, tensors)


def _load(runner: Any, flat: Tensor, tensors: Sequence[Sequence[Any]]) -> None:
    """Load tensors of a bucket. Wait until all copies are done, because the sender then fills the bucket again."""
    before_update()
    try:
        runner.model.load_weights(tensor_within(flat, *tensor) for tensor in tensors)
    finally:
        torch.get_device_module(state().weights.device).synchronize()


def tensor_within(flat: Tensor, name: str, dtype: str, shape: Sequence[int], start: int) -> tuple[str, Tensor]:
    """Return the name and the tensor that begins at byte `start` of a bucket. dtype: torch's name of it."""
    end = start + math.prod(shape) * getattr(torch, dtype).itemsize
    return name, flat[start:end].view(getattr(torch, dtype)).view(shape)


def commit(runner: Any, version: str) -> dict[str, str]:
    """Rebuild the GEMM operands of the weights, and give the weights this version. Return the digests."""
    entries = state().weights.commit(version)
    capture_again(runner)
    return entries


def map_base(runner: Any, address: str) -> int:
    """From the next commit on, compute with the weights of the shared base (`models.shared_base`) at this address
    (`numerics.core.memory`), and no longer with the engine's own. Return the size of the base in bytes."""
    current = state()
    flat = mapped(address)
    current.weights.map_base(SharedBase(flat, current.weights.definition, current.numerics.rollout_spec))
    give_back()
    return flat.nbytes


def make_host_cache(self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """Replaces `BaseHostCache.__init__`: make the buffer of routed experts, with a row for each KV slot.

    The buffer is pinned only if there is a GPU. It begins with -1, which is no expert.
    """
    shape, pinned = (num_tokens, num_layers, topk_size), torch.cuda.is_available()
    self.buffer = torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned)
    self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name
    self._log_allocation()


# Sleep: an engine gives up weights, KV cache and CUDA graphs, and takes the room back before a sync fills it.
#
# On a GPU SGLang uses torch_memory_saver, which unmaps the memory of tensors and keeps their addresses. On a CPU, where
# there is no torch_memory_saver, this file frees weights and cache. In both cases the contents are lost.


def release(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.release_memory_occupation`: release memory that is not released yet.

    SGLang's method fails if any request waits. Here requests without a KV cache may wait. Their prefixes are prefilled
    when the engine wakes.
    """
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    recv_req.tags = [tag for tag in recv_req.tags or RELEASED if tag not in self.offload_tags]
    if not recv_req.tags:
        return ReleaseMemoryOccupationReqOutput()
    if WEIGHTS in recv_req.tags:
        state().weights.release()
    with _hidden_queue(self.scheduler):
        answer = original(self, recv_req)
    saved, runner = self.memory_saver_adapter.enabled, self.tp_worker.model_runner
    for tag in recv_req.tags:
        state().released[tag] = [] if saved else freed(_tensors(runner, tag))
    if not saved:
        give_back()
    return answer


def resume(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.resume_memory_occupation`: allocate the released memory again.

    The cache is filled with zeros, as at the engine's start. Masked keys have no effect only if they are finite, and
    the rows that pad the batch of a CUDA graph must have slots that exist.
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
    """Capture an engine's CUDA graphs again if its weights have other addresses than when the graphs were captured.

    A capture runs the model, so it waits until the weights are committed and no memory is released.
    """
    weights = state().weights
    if weights.moved and weights.version is not None and not state().released and weights.device.type == "cuda":
        runner.init_decode_cuda_graph()
        weights.moved = False


def freed(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Free the memory of these tensors. Return (storage, number of bytes) for each storage that was freed."""
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if size := storage.nbytes():  # several tensors may share it
            found.append((storage, size))
            storage.resize_(0)
    return found


def memory(runner: Any) -> Memory:
    """Return the memory that a rank of the engine has in use. runner: SGLang's ModelRunner.

    Only `in_use` counts CUDA graphs, because torch does not know their size.
    """
    device, sizes = state().weights.device, dict.fromkeys((WEIGHTS, CACHE), 0)
    for tag in sizes.keys() - state().released.keys():
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _tensors(runner, tag)}
        sizes[tag] = sum(storage.nbytes() for storage in storages.values())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(in_use=total - free, **sizes)
    give_back()  # what was freed is nobody's
    return Memory(in_use=psutil.Process().memory_info().rss, **sizes)


def _tensors(runner: Any, tag: str) -> Iterator[Tensor]:
    if tag == WEIGHTS:
        yield from state().weights.everything()
    elif tag == CACHE:
        yield from (buffer for *_, buffer in cache_buffers(runner))


# Hooks that make a pause safe for an update of the weights, and put its idle time to use.
#
# `/pause_generation {"mode": "retract"}` frees the KV cache of every running request, and puts the request back into
# the scheduler's queue with its tokens and log-probabilities. After the pause its prefix is prefilled again, by the new
# weights.


def flush_cache(original: Callable[..., bool], self: Any, empty_cache: bool = True) -> bool:
    """Around `Scheduler.flush_cache`: let a paused scheduler flush also if requests without a KV cache wait.

    The flush is needed, because the radix tree still has prefixes of the old weights. But SGLang 0.5.19 refuses to
    flush while any request waits, and during an update this ends the server. SGLang's other conditions still apply:
    nothing runs, and no chunk is being prefilled.
    """
    with _hidden_queue(self) if self._engine_paused else nullcontext():
        return original(self, empty_cache)


@contextmanager
def _hidden_queue(scheduler: Any) -> Iterator[None]:
    """Let a scheduler seem to have no waiting requests inside the block, if none of them has a KV cache."""
    waiting = scheduler.waiting_queue
    if not any(request.kv.holds_kv for request in waiting):
        scheduler.waiting_queue = []
    try:
        yield
    finally:
        scheduler.waiting_queue = waiting


def process_input_requests(result: None, self: Any, recv_reqs: list[Any]) -> None:
    """After `Scheduler.process_input_requests`: let a paused scheduler prepare the weights that have arrived, and then
    sleep until the next message. Without this it would use a whole core.

    It sleeps only if the server was started with `--sleep-on-idle`, as on a CPU.
    """
    if self._engine_paused and not recv_reqs:
        state().weights.prepare()
        self.maybe_sleep_on_idle()


CALLS: dict[str, Callable[..., Any]] = {
    "load_bucket": load_bucket,
    "receive_bucket": receive_bucket,
    "commit": commit,
    "map_base": map_base,
    "manifest": lambda runner: state().weights.manifest(),
    "probe": lambda runner, recording: op_probe.answer(runner, Path(recording)),
    "formats": op_probe.formats,
    "report": report,
    "inventory": lambda runner: inventory(state().weights, runner),
    "memory": memory,
    "ping": lambda runner: state().weights.version,
}
"""The calls that an engine's owner can make. Each function gets SGLang's ModelRunner and the call's arguments."""
