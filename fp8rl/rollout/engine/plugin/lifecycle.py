"""Hooks around SGLang's life: the model is loaded, weights are updated, somebody asks what is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from fp8rl.models import read_model
from fp8rl.models.shared_base import SharedBase, parameter_spans
from fp8rl.models.tensors import EngineRank
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.backend.implementation import choose
from fp8rl.numerics.core.memory import ZEROS, give_back, placeholders
from fp8rl.numerics.core.shared_memory import mapped
from fp8rl.numerics.probe import choose_deepgemm, choose_tiles
from fp8rl.rollout.engine import protocol
from fp8rl.rollout.engine.plugin import op_probe, sleeping
from fp8rl.rollout.engine.plugin.families import check_forms
from fp8rl.rollout.engine.plugin.parameters import AdaptedRows
from fp8rl.rollout.engine.plugin.state import inventory, report, state


def load_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`ModelRunner.load_model`, and `after_load_model`. Weights that come from a base have placeholders until then."""
    waits = state().waits
    if waits and (found := self.server_args.load_format) != "dummy":
        raise RuntimeError(
            f"fp8rl plugin: found load_format {found} for an engine that reads its weights from a base, expected "
            "dummy; start it from a directory without weights"
        )
    with placeholders(ZEROS) if waits else nullcontext():
        result = original(self, *args, **kwargs)
    after_load_model(self)
    return result


def after_load_model(self: Any) -> None:
    """Choose how the ops run, and take charge of the weights that a `ModelRunner` has loaded."""
    current = state()
    device = next(self.model.parameters()).device
    current.implementation = choose(device, current.numerics.spec)
    if current.implementation == "torch":
        if device.type != "cpu" and current.numerics.mode == "exact":
            raise RuntimeError(
                f"fp8rl plugin: found {torch.cuda.get_device_name(device)} and the spec {current.numerics.spec}, "
                "expected a data-centre GPU that converts to FP8, weights in blocks of 128 and the others in token "
                "groups of 128: the exact ops have no kernels for it, and their torch form cannot run in a CUDA graph. "
                "Set numerics.mode to native"
            )
        enable_compiler()
    for name, module in self.model.named_modules():
        if name.endswith(".topk") and module.layer_id is None:  # SGLang's OLMoE leaves it out
            module.layer_id = int(name.split(".")[-3])  # by which the router's choice is kept for replay
    definition = read_model(Path(self.server_args.model_path), served=True).adapted(current.adapter)
    if current.numerics.mode == "exact":
        for module in self.model.modules():
            if hasattr(module, "routed_scaling_factor") and hasattr(module, "experts"):
                module.routed_scaling_factor = 1.0  # of the rounded sum of experts: it is in their probabilities
        choose_tiles(device)
        current.without_deepgemm = choose_deepgemm(device, current.numerics.deepgemm)
        check_forms(definition.forward, current.provides)
    rank = EngineRank(self.ps.tp_rank, self.ps.tp_size)
    of_base = parameter_spans(definition, current.numerics.rollout_spec) if current.waits else ()
    rows = AdaptedRows(self.server_args.max_total_tokens, device) if current.base_name is not None else None
    current.weights.attach(self.model, definition, self.server_args.weight_version, rank, of_base, rows)
    self.model.load_weights = functools.partial(current.weights.load, self.model.load_weights)


def unpadded(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """`adjust_config_with_unaligned_cpu_tp`, which makes experts wider, though no rank has less than a whole one.

    Some models read numbers of heads on a CPU that are noted there.
    """
    from sglang.srt.configs.update_config import adjust_tp_num_heads_if_necessary

    adjust_tp_num_heads_if_necessary(model_config.hf_text_config, tp_size, True)
    return model_config


def before_forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """`ModelRunner.forward`: a captured CUDA graph would run on weights that nobody committed, and not notice."""
    state().weights.check()
    if (rows := state().weights.adapted_rows) is not None:
        rows.take(forward_batch)


def before_update(*args: Any, **kwargs: Any) -> None:
    """Every way in which SGLang writes weights while it serves."""
    state().weights.invalidate()


def update_from_tensor(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`WeightUpdater.update_weights_from_tensor`: the sender fills the bucket again once this has answered, and SGLang
    answers when it has asked for the copies out of it. They are waited for."""
    before_update()
    try:
        return original(self, *args, **kwargs)
    finally:
        torch.get_device_module(self.device).synchronize()


def check_weights(original: Any, self: Any, action: str, allow_quant_error: bool = False) -> Any:
    """`ModelRunner.check_weights`: answer a call of ours (`rollout.protocol`), in SGLang's form of an answer."""
    answer: protocol.Message
    match protocol.from_action(action):
        case None:
            return original(self, action=action, allow_quant_error=allow_quant_error)
        case protocol.Commit(version=version):
            answer = protocol.Held(entries=state().weights.commit(version))
            sleeping.capture_again(self)
        case protocol.MapBase(address=address):
            answer = map_base(address)
        case protocol.ReadManifest():
            answer = protocol.Held(entries=state().weights.manifest())
        case protocol.Probe(recording=recording):
            answer = protocol.ProbeAnswer(sha256=op_probe.answer(self, recording))
        case protocol.ReadReport():
            answer = report(self)
        case protocol.ReadInventory():
            answer = protocol.Inventory(held=inventory(state().weights, self))
        case protocol.ReadMemory():
            answer = sleeping.memory(self)
        case protocol.Ping():
            answer = protocol.Pong(weight_version=state().weights.version)
    own = state().weights.rank
    parallelism = {"tp_rank": own.rank, "tp_size": own.ranks, "rank": own.rank, "size": own.ranks}
    parallelism |= {"dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
    return {"checksums": protocol.to_checksums(answer), "per_gpu_checksum": "", "parallelism_info": parallelism}


def map_base(address: str) -> protocol.Mapped:
    """Compute with the weights at this address from the next commit on."""
    current = state()
    flat = mapped(address)
    current.weights.map_base(SharedBase(flat, current.weights.definition, current.numerics.rollout_spec))
    give_back()
    return protocol.Mapped(bytes=flat.nbytes)


def make_host_cache(self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """`BaseHostCache.__init__`: routed experts, kept by KV slot.

    Pinned only where there is a GPU to copy from, and with -1, which is no expert, where nothing was recorded.
    """
    shape, pinned = (num_tokens, num_layers, topk_size), torch.cuda.is_available()
    self.buffer = torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned)
    self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name
    self._log_allocation()
