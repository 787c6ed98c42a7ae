"""Lists and makes all changes to megatron-core 0.16.1, and to torch and TransformerEngine as Megatron uses them.

Each entry has the parameters that its target must have. If a target is missing or has other parameters, an error names
it before anything is changed. PATCHES give another value to an attribute. OVERRIDES name methods that our subclasses
override although the library does not document this use. Where Megatron itself creates the object, the finished
object's class is changed to ours.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import logging
import pkgutil
import queue
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from fp8rl.numerics.core.files import changed_signature
from fp8rl.trainer import device
from fp8rl.trainer.megatron import cpu_runtime

MEGATRON_VERSION = "0.16.1"
Where = Literal["everywhere", "without CUDA", "without TransformerEngine", "with TransformerEngine"]
_ABSENT = "absent"


@dataclass(frozen=True)
class Patch:
    """A change of a library's attribute.

    target: the attribute's dotted name. parameters: the expected parameter names of the function or class, in order,
    without `self`. None: the attribute is no function or class, or has no signature. "absent": the attribute may be
    missing. make: returns the attribute's new value for its old value.
    """

    target: str
    parameters: str | None
    make: Callable[[Any], Any]
    why: str
    where: Where = "everywhere"


@dataclass(frozen=True)
class Override:
    """A method of a library's class, and the class of this project that overrides it. parameters: as in `Patch`."""

    target: str
    parameters: str
    ours: str
    why: str


def _value(value: Any) -> Callable[[Any], Any]:
    return lambda replaced: value


def _ours(module: str, name: str) -> Callable[[Any], Any]:
    """Return a `Patch.make` that imports a function of the trainer late, because this import also imports Megatron."""
    return lambda replaced: getattr(importlib.import_module(f"fp8rl.trainer.{module}"), name)


def _compiled_when_called(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `torch.compile` that loads the compiler only when the function is first called."""

    def late(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if function is None:
            return functools.partial(late, **options)
        compiled: Callable[..., Any] | None = None

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if torch.compiler.is_compiling():  # it becomes a part of whoever calls it
                return function(*args, **kwargs)
            compiled = compiled or compiler(function, **options)
            return compiled(*args, **kwargs)

        return call

    return late


_without_cuda = functools.partial(Patch, where="without CUDA")


_CORE = "megatron.core."
_DCP = "torch.distributed.checkpoint."
_STREAM = cpu_runtime.HostStream()
_STREAMS = "the all-to-all dispatcher copies split sizes to the host on a side stream (token_dispatcher.py:870)"
_RANDOM = "tensor_parallel/random.py keeps one CUDA random state per parallel region; on the CPU they are CPU states"
_PLACES = {  # of literal device="cuda"
    "pipeline_parallel.schedules": "schedules.py:596",
    "optimizer.optimizer": "optimizer.py:473",
    "optimizer.clip_grads": "clip_grads.py:103",
    "distributed.param_and_grad_buffer": "buffers of gradients and parameters",
    "utils": "utils.py:1207",
    "transformer.utils": "transformer/utils.py:35",
}

LATE_COMPILE = Patch(
    "torch.compile",
    None,  # torch 2.11 has fewer parameters than 2.13; whatever is given is handed on
    _compiled_when_called,
    "Megatron's fused functions load the compiler when they are defined, two seconds of a start, and exact mode calls "
    "none; only while Megatron is imported",
)
CUDA_TYPES = _without_cuda(
    "torch.Tensor.type",
    None,
    cpu_runtime.cuda_type,
    "the optimizer sorts parameters by `torch.cuda.*` (distrib_optimizer.py:361,420,582; clip_grads.py:167); "
    "only while it does",
)
PATCHES: tuple[Patch, ...] = (
    Patch(
        _CORE + "optimizer.distrib_optimizer.gc",
        None,
        _value(SimpleNamespace(collect=lambda: None)),
        "for runs without garbage collection it collects after each gather, which takes as long as the gather",
    ),
    Patch(
        _CORE + "dist_checkpointing.strategies.filesystem_async._get_write_results_queue",
        "",
        _value(queue.Queue),
        "it starts a manager process for a queue through which nothing goes here",
    ),
    *(
        Patch(
            target,
            parameters,
            _ours("checkpoint.pickles", name),
            "a checkpoint's pickles are of somebody else's making, and this loads them whatever they call",
        )
        for target, parameters, name in (
            (_DCP + "filesystem.FileSystemReader.read_metadata", "args kwargs", "metadata_of_reader"),
            (_DCP + "default_planner.DefaultLoadPlanner.load_bytes", "read_item value", "load_bytes"),
            (
                _CORE + "dist_checkpointing.strategies.common.TorchCommonLoadStrategy.load_common",
                "checkpoint_dir",
                "load_common",
            ),
        )
    ),
    Patch(
        _CORE + "transformer.multi_latent_attention.HAVE_TE",
        None,
        _value(False),
        "it is true although TransformerEngine's classes are None, which isinstance refuses",
        "without TransformerEngine",
    ),
    Patch(
        _CORE + "transformer.moe.moe_utils.te_general_gemm",
        _ABSENT,
        lambda found: found,
        "moe_utils.py:1192 reads this name, which its imports only define with TransformerEngine",
    ),
    *(
        Patch(f"{_CORE}transformer.moe.token_dispatcher.{name}", parameters, _ours("modules.native.mlp", name), why)
        for name, parameters, why in (
            ("permute", "tokens routing_map probs num_out_tokens fused drop_and_pad", "its backward pass uses atomics"),
            (
                "unpermute",
                "permuted_tokens sorted_indices restore_shape probs routing_map fused drop_and_pad",
                "it uses atomics",
            ),
        )
    ),
    Patch(
        _CORE + "transformer.moe.moe_utils.group_limited_topk",
        "scores topk num_tokens num_experts num_groups group_topk",
        _ours("modules.native.mlp", "best_of_groups"),
        "it scores a group by its topk // group_topk best experts (moe_utils.py:554), models by their two best",
    ),
    Patch(
        _CORE + "optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
        "model_param tensors",
        cpu_runtime.step_of_its_own,
        "distrib_optimizer.py:821 gives all parameters of torch's AdamW one `step` tensor on loading, so that each "
        "advances everybody's, and :940 writes into leaves that require grad",
        "without TransformerEngine",
    ),
    Patch(
        _CORE + "extensions.transformer_engine.TEGroupedLinear._split_extra_state",
        "state",
        _value(lambda self, state: [state] * self.num_gemms),
        "block scaling keeps no state between steps: an empty one cannot be cut into experts for a checkpoint "
        "(extensions/transformer_engine.py:1705)",
        "with TransformerEngine",
    ),
    _without_cuda(
        _CORE + "transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        "tensor as_numpy record_stream",
        cpu_runtime.split_sizes_as_numbers,
        "moe_utils.py:1092 makes numbers of split sizes only if they were on a GPU; gloo needs numbers as well",
    ),
    _without_cuda("torch.cuda.current_device", "", _value(lambda: cpu_runtime.CPU), "every parameter is created there"),
    _without_cuda("torch.cuda.set_device", "device", cpu_runtime.no_op, "there is one"),
    _without_cuda("torch.cuda.synchronize", "device", cpu_runtime.no_op, "nothing is under way"),
    _without_cuda("torch.cuda.empty_cache", "", cpu_runtime.no_op, "there is none"),
    _without_cuda("torch.cuda.Stream", "device priority kwargs", _value(cpu_runtime.HostStream), _STREAMS),
    _without_cuda(
        "torch.cuda.Event", "enable_timing blocking interprocess external", _value(cpu_runtime.HostEvent), _STREAMS
    ),
    *(
        _without_cuda(f"torch.cuda.{name}", "device", _value(lambda *args: _STREAM), _STREAMS)
        for name in ("current_stream", "default_stream")
    ),
    _without_cuda("torch.cuda.stream", "stream", _value(lambda *args: contextlib.nullcontext()), _STREAMS),
    *(
        _without_cuda(f"torch.cuda.{module}{name}", parameters, _value(stand_in), _RANDOM)
        for module in ("", "random.")
        for name, parameters, stand_in in (
            ("get_rng_state", "device", lambda device=None: torch.get_rng_state()),
            ("set_rng_state", "new_state device", lambda state, device=None: torch.set_rng_state(state)),
            ("manual_seed", "seed", lambda seed: torch.default_generator.manual_seed(seed)),
            ("manual_seed_all", "seed", lambda seed: torch.default_generator.manual_seed(seed)),
        )
    ),
    _without_cuda("torch.cuda.default_generators", None, _value(defaultdict(lambda: torch.default_generator)), _RANDOM),
    *(
        _without_cuda(f"{module}._lazy_call", "callable kwargs", _value(lambda call, **kwargs: call()), _RANDOM)
        for module in ("torch.cuda", f"{_CORE}tensor_parallel.random")
    ),
    *(
        _without_cuda(f"{_CORE}{module}.torch", None, cpu_runtime.TorchOnCpu, f'device="cuda" in {place}')
        for module, place in _PLACES.items()
    ),
    _without_cuda(
        "torch.Tensor.cuda",
        None,
        _value(lambda self, *args, **kwargs: self),
        "language_module.py:244 moves a tied embedding of the last pipeline stage",
    ),
)

OVERRIDES: tuple[Override, ...] = (
    Override(
        _CORE + "tensor_parallel.layers.VocabParallelEmbedding.forward",
        "input_",
        "fp8rl.trainer.megatron.model.Embedding",
        "a token's gradients are added in FP32; GPTModel names the class itself",
    ),
    *(
        Override(
            _CORE + f"tensor_parallel.layers.{base}._forward_impl",
            "input weight args kwargs",
            f"fp8rl.trainer.modules.{ours}",
            "the local product alone is another; communication stays Megatron's",
        )
        for base, ours in (
            ("ColumnParallelLinear", "exact.PlainColumnLinear"),  # GPTModel names the class itself
            ("ColumnParallelLinear", "native.ColumnLinear"),
            ("RowParallelLinear", "native.RowLinear"),
        )
    ),
    Override(
        _CORE + "transformer.moe.router_replay.RouterReplay.get_replay_topk",
        "scores topk num_groups group_topk default_compute_topk",
        "fp8rl.trainer.step.routing.LayerRouting",
        "it records while it replays, and leaves unknown routes to the router; the router names the class itself",
    ),
    *(
        Override(
            f"{_CORE}distributed.param_and_grad_buffer._ParamAndGradBucketGroup.{method}",
            parameter,
            "fp8rl.trainer.distributed.wires.BucketGroup",
            "gradients and weights travel in the formats of the spec; Megatron names the class itself",
        )
        for method, parameter in (("start_grad_sync", "force_all_reduce"), ("start_param_sync", "force_sync"))
    ),
    Override(
        _CORE + "optimizer.distrib_optimizer.DistributedOptimizer.get_parameter_state_dp_zero",
        "use_gloo_comm empty_data return_on_all_ranks",
        "fp8rl.trainer.distributed.gathering.GatheredInPieces",
        "it gathers whole buffers on a GPU (distrib_optimizer.py:1077), twice their size",
    ),
    Override(
        _CORE + "optimizer.distrib_optimizer.DistributedOptimizer.get_main_grads_for_grad_norm",
        "",
        "fp8rl.trainer.distributed.gathering.GatheredInPieces",
        "experts in one parameter give the same bits of the norm as experts in several parameters",
    ),
    Override(
        _CORE + "distributed.DistributedDataParallel._make_backward_post_hook",
        "param",
        "fp8rl.trainer.distributed.optimizer.DataParallel",
        "hooks hang on nodes of autograd, where no collector sees that they keep the wrapper alive",
    ),
    Override(
        _CORE + "dist_checkpointing.strategies.torch.TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks",
        "writer save_state_dict_ret",
        "fp8rl.trainer.checkpoint.writer.WritePlan",
        "only its plan is used; its writers are forked, which can deadlock",
    ),
)

_installed = False


def install() -> None:
    """Apply all patches for this machine. A second call does nothing. Call it before the process groups exist. Raises
    RuntimeError, and changes nothing, if some targets are not as expected. The message names them all."""
    global _installed
    if _installed:
        return
    # Megatron reports every optional accelerator that is not installed, once per module.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed)\..*")
    with applied(LATE_COMPILE):  # `megatron.core.jit` keeps it, for what is imported later
        importlib.import_module("megatron.core")
    patches = [patch for patch in PATCHES if _applies(patch.where)]
    rows: tuple[Patch | Override, ...] = (LATE_COMPILE, *patches, *OVERRIDES)
    changed = (changed_signature(row.target, row.parameters) for row in rows if row.parameters != _ABSENT)
    if problems := list(filter(None, changed)):
        raise RuntimeError(
            f"found megatron-core {importlib.metadata.version('megatron-core')} with other code, expected the code of "
            f"{MEGATRON_VERSION}; nothing was changed. Install the locked versions:\n" + "\n".join(problems)
        )
    for patch in patches:
        _apply(patch)
    _installed = True


def become(finished: Any, ours: type) -> Any:
    """Change the class of a finished object to `ours`, a subclass of its class. A row of OVERRIDES must name `ours`."""
    name = f"{ours.__module__}.{ours.__qualname__}"
    assert any(row.ours == name for row in OVERRIDES) and issubclass(ours, type(finished)), name
    finished.__class__ = ours
    return finished


@contextlib.contextmanager
def applied(patch: Patch) -> Iterator[None]:
    """Apply a patch inside the block, if the patch is for this machine."""
    if not _applies(patch.where):
        yield
        return
    owner, name, original = _apply(patch)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _applies(where: Where) -> bool:
    if where == "everywhere":
        return True
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    return {
        "without CUDA": not torch.cuda.is_available(),
        "without TransformerEngine": not HAVE_APEX_OR_TE,
        "with TransformerEngine": device.has_transformer_engine(),
    }[where]


def _apply(patch: Patch) -> tuple[Any, str, Any]:
    """Apply a patch. Return the owner of the attribute, its name, and its old value."""
    path, _, name = patch.target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    original = getattr(owner, name, None)
    setattr(owner, name, patch.make(original))
    return owner, name, original
