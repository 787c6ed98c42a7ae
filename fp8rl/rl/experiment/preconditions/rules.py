"""Rules that a spec, the sizes of its model, and the machines of the run must meet together.

The checks start nothing and read no file. `train` and `doctor` apply them for this machine, `plan` for any GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from fp8rl.models.shape import Shape
from fp8rl.numerics.backend.cuda_toolkit import other_compilers
from fp8rl.numerics.backend.implementation import (
    BLACKWELL,
    FEWEST_CAPABILITY,
    HOPPER,
    SMALL_CAPABILITY,
    capability_of,
    deepgemm_lacks,
    expandable_segments,
    has_deepgemm,
    implementation_for,
)
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError, raise_first, user_error
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.trainer.device import has_transformer_engine
from fp8rl.trainer.megatron.lowering import by_mx, lower, lower_optimizer
from fp8rl.trainer.megatron.model_checks import check_engine_layout, check_layout, check_rows, check_training


@dataclass(frozen=True)
class Target:
    """The machines that a run is for."""

    gpus: bool
    """The machines have GPUs."""
    transformer_engine: bool
    """TransformerEngine is installed there; `deepgemm` says the same of DeepGEMM."""
    deepgemm: bool = True
    capability: tuple[int, int] | None = None
    """Compute capability of the GPUs; None: not known."""
    expandable_segments: str | None = None
    """The setting of torch's allocator there that turns on expandable segments; None: they are off."""
    other_compilers: str | None = None
    """CUDA's compilers there (or `none`) if all are of other releases than torch is built for; None if one fits."""
    known: bool = True
    """False for the machines of a cluster that is not ours, which are checked when the run is placed on them."""

    @property
    def named(self) -> str:
        """The name of the GPUs in messages."""
        return f"on GPUs of compute capability {dotted(self.capability or ())}"

    @classmethod
    def here(cls) -> Target:
        """Return this machine. If RAY_ADDRESS names a cluster, its machines are not `known`."""
        gpus, known = torch.cuda.is_available(), "RAY_ADDRESS" not in os.environ
        capability = capability_of("cuda") if gpus and known else None
        compilers = other_compilers(torch.version.cuda) if gpus and known and torch.version.cuda else None
        return cls(gpus, has_transformer_engine(), has_deepgemm(), capability, expandable_segments(), compilers, known)


def dotted(capability: tuple[int, ...]) -> str:
    """Write a compute capability as messages do, e.g. `9.0`."""
    return ".".join(map(str, capability))


def check_target(experiment: Experiment, shape: Shape, target: Target) -> None:
    """Raise `UserError` for the first rule that the spec breaks with this model on these machines."""
    raise_first(broken_rules(experiment, shape, target))


def broken_rules(experiment: Experiment, shape: Shape, target: Target) -> Iterator[UserError]:
    """Yield the first error of each check that the spec does not pass."""
    for check in CHECKS:
        try:
            raise_first(check(experiment, shape, target) or ())
        except UserError as refusal:
            yield refusal


def engine_ranks(e: Experiment, gpus: bool) -> Iterator[UserError]:
    """Refuse engines of several ranks in exact mode on GPUs, where none has run yet, and in native mode on CPUs."""
    mode = e.numerics.mode
    for key, width in (("rollout.tp", e.rollout.tp), ("teacher.tp", 1 if e.teacher is None else e.teacher.tp)):
        if width > 1 and (mode == "exact") is gpus:
            found = f"{width} with numerics.mode={mode} on {'GPUs' if gpus else 'CPUs'}"
            yield user_error(key, found, "1 there", f"Set {key}=1, or numerics.mode={'native' if gpus else 'exact'}.")


def shared_memory_refusals(target: Target) -> Iterator[UserError]:
    """Yield an error if trainer and engine cannot share the memory of a GPU."""
    if target.gpus and target.known and (setting := target.expandable_segments):
        expected = (
            "no expandable segments: trainer and engine share memory by CUDA IPC, and a sleeping engine releases it"
        )
        remedy = "Unset the variable, or take expandable_segments out of it."
        yield user_error("PYTORCH_ALLOC_CONF", setting, expected, remedy)


def _deepgemm(e: Experiment, shape: Shape, target: Target) -> Iterator[UserError]:
    """Check that DeepGEMM can run. Each process that uses it compares its bits with our kernels' when it starts."""
    asked = e.numerics.mode == "exact" and e.numerics.deepgemm and target.known
    if asked and (lacks := deepgemm_lacks(target.capability, target.deepgemm)):
        remedy = "Set numerics.deepgemm=false: products run on our kernels, with the same results."
        yield user_error("numerics.deepgemm", f"true, and no {lacks} here", "a Hopper GPU and DeepGEMM", remedy)


def _engines(e: Experiment, shape: Shape, target: Target) -> Iterator[UserError]:
    if not target.known:
        return
    yield from engine_ranks(e, target.gpus)
    if target.gpus and e.rollout.sleep and e.rollout.tp > 1:
        found = f"true with rollout.tp={e.rollout.tp} on GPUs"
        expected = (
            "engines of one rank: larger ones have GPUs of their own, where sleeping frees no memory for the trainer"
        )
        yield user_error("rollout.sleep", found, expected, "Set rollout.sleep=false, or rollout.tp=1.")


def _compiler(e: Experiment, shape: Shape, target: Target) -> Iterator[UserError]:
    if e.needs_engines and target.other_compilers:
        cuda = torch.version.cuda
        expected = f"one of CUDA {cuda}, as torch is built for: an engine compiles kernels of SGLang when it starts"
        remedy = "Install that toolkit (`make install-gpu` brings its compiler), or set CUDA_HOME to it."
        yield user_error("CUDA_HOME", f"nvcc: {target.other_compilers}", expected, remedy)


def _base(e: Experiment, shape: Shape, target: Target) -> Iterator[UserError]:
    ranks, engines = e.trainer.world_size, e.rollout.engines
    if target.gpus and e.sync.shared_base and (ranks, engines) != (1, 1):
        found = f"true with {ranks} trainer rank(s) and {engines} engine(s) on GPUs"
        expected = "one trainer rank and one engine, on the GPU that has the weights in its memory"
        remedy = "Set sync.shared_base=false, or trainer.tp, pp, dp and cp to 1 and rollout.engines to 1."
        yield user_error("sync.shared_base", found, expected, remedy)


def _kernels(e: Experiment, shape: Shape, target: Target) -> Iterator[UserError]:
    """Refuse GPUs on which exact mode's kernels do not run: the definitions in torch cannot run in a CUDA graph."""
    capability, spec = target.capability, e.numerics_config().spec
    if e.numerics.mode != "exact" or capability is None:
        return
    if implementation_for(capability, spec) == "triton":
        for family, _ in shape.layers_of():
            if family.kernels and capability < family.kernels[0]:
                found = f"exact with {family.name} {family.part} {target.named}"
                expected = f"{dotted(family.kernels[0])} to 11.x: {family.kernels[1]}"
                yield user_error("numerics.mode", found, expected, "Set numerics.mode=native, or take other GPUs.")
    elif not e.needs_engines:
        return
    elif implementation_for(HOPPER, spec) == "torch":
        served = e.numerics_config().rollout_spec
        # SGLang has no products for such weights of an engine.
        also = " numerics.rollout=bf16" if served.quantized and served.weight.mx else ""
        found = f"{e.numerics.preset} with numerics.mode=exact on GPUs"
        expected = (
            "weights in blocks of 128, activations and gradients in token groups of 128, for which there are kernels"
        )
        remedy = f"Set numerics.preset=fp8_block_pow2, or numerics.mode=native{also}."
        yield user_error("numerics.preset", found, expected, remedy)
    else:
        also = " numerics.trainer=bf16 numerics.rollout=bf16" if capability < FEWEST_CAPABILITY else ""
        expected = (
            f"{dotted(FEWEST_CAPABILITY)} to 11.x: earlier ones have no FP8, and later ones too little shared memory "
            "for a tile of the exact kernels"
        )
        remedy = f"Set numerics.mode=native{also}, or take other GPUs."
        yield user_error("numerics.mode", f"exact {target.named}", expected, remedy)


def native_refusals(numerics: NumericsConfig, engines: bool, target: Target) -> Iterator[UserError]:
    """Refuse native mode on GPUs where SGLang or TransformerEngine cannot compute its FP8 products."""
    capability = target.capability
    if numerics.mode != "native" or capability is None:
        return
    if engines and numerics.rollout_spec.quantized and capability < FEWEST_CAPABILITY:
        expected = f"{dotted(FEWEST_CAPABILITY)} or higher, for SGLang's kernels"
        yield _no_fp8("numerics.rollout", target, expected)
    spec = numerics.trainer_spec
    if not (target.transformer_engine and spec.quantized):
        return
    if by_mx(spec) and not BLACKWELL <= capability < SMALL_CAPABILITY:
        least = f"{dotted(BLACKWELL)} or higher, below {dotted(SMALL_CAPABILITY)}"
        yield _no_fp8("numerics.trainer", target, f"{least}, for TransformerEngine's MXFP8")
    if not by_mx(spec) and capability < HOPPER:
        expected = f"{dotted(HOPPER)} or higher, for TransformerEngine's blocks of 128"
        yield _no_fp8("numerics.trainer", target, expected)
    if capability >= BLACKWELL and spec.weight.scale != "pow2":
        found = f"FP32 scales with numerics.mode=native {target.named}"
        expected = "scales that are powers of two: these GPUs compute blocks of 128 as MX"
        yield user_error("numerics.preset", found, expected, "Set numerics.preset=fp8_block_pow2.")


def _no_fp8(key: str, target: Target, expected: str) -> UserError:
    found = f"fp8 with numerics.mode=native {target.named}"
    return user_error(key, found, expected, f"Set {key}=bf16, or take other GPUs.")


def _layout(e: Experiment, shape: Shape, target: Target) -> Iterator[UserError]:
    """Check that the model splits into tp, pp, ep and dp parts of whole blocks, and has the routes asked for."""
    replay, numerics = e.numerics.router_replay, e.numerics_config()
    if e.trainer.pp > 1 and replay != "off":
        found = f"{e.trainer.pp} with numerics.router_replay={replay}"
        expected = "1: a pipeline stage has only the routers of its own layers"
        yield user_error("trainer.pp", found, expected, "Set trainer.pp=1, or numerics.router_replay=off.")
    if replay != "off" and not shape.sizes.moe:
        remedy = "Set numerics.router_replay=off, or choose a mixture of experts."
        yield user_error("numerics.router_replay", replay, "off for a dense model, which has no experts", remedy)
    check_layout(shape, e.trainer, numerics.blocks_spec)
    check_training(shape, e.trainer, numerics.trainer_spec)
    check_engine_layout(shape, e.rollout.tp, numerics.blocks_spec, numerics.mode)


def _optimizer(e: Experiment, shape: Shape, target: Target) -> None:
    lowered = lower(e.numerics_config(), target.transformer_engine)
    held_in_fp8 = bool(lowered.ddp.get("fp8_param_gather"))
    lower_optimizer(e.trainer.optimizer, held_in_fp8, target.gpus, target.transformer_engine)


def _gates(e: Experiment, shape: Shape, target: Target) -> Iterator[UserError]:
    layers = shape.sizes.moe_layers
    for index, gate in enumerate(e.gates):
        layer = gate.metric.removeprefix("mismatch/router_agreement_layer_")
        if layer != gate.metric and int(layer) >= layers:
            expected = f"a layer below {layers}, the model's layers with experts"
            remedy = "Correct the number, or remove the gate."
            yield user_error(f"gates.{index}.metric", gate.metric, expected, remedy)


def _context(e: Experiment, shape: Shape, target: Target) -> Iterator[UserError]:
    rollout, sizes = e.rollout, shape.sizes
    length = rollout.context_length
    if length > sizes.max_positions:
        expected = f"at most {sizes.max_positions}, the model's {sizes.limit}"
        remedy = f"Set rollout.context_length={sizes.max_positions} or less."
        yield user_error("rollout.context_length", length, expected, remedy)
    if rollout.max_new_tokens >= length:
        expected = f"less than rollout.context_length = {length}, which holds the prompt too"
        remedy = "Lower rollout.max_new_tokens or raise rollout.context_length."
        yield user_error("rollout.max_new_tokens", rollout.max_new_tokens, expected, remedy)
    if rollout.cache_tokens < length:
        expected = f"at least rollout.context_length = {length}"
        remedy = "Raise rollout.max_total_tokens or lower rollout.context_length."
        yield user_error("rollout.max_total_tokens", rollout.cache_tokens, expected, remedy)


def _cpu_heads(e: Experiment, shape: Shape, target: Target) -> Iterator[UserError]:
    sizes, on_cpus = shape.sizes, target.known and not target.gpus
    if on_cpus and e.numerics.mode == "native" and sizes.cpu_head_dim not in (0, sizes.head_dim):
        found = (
            f"native on CPUs, with heads of {sizes.head_dim} in a model of {sizes.heads} heads and hidden_size = "
            f"{sizes.hidden_size}"
        )
        expected = f"heads of hidden_size / heads = {sizes.cpu_head_dim}, which SGLang's own model takes on a CPU"
        yield user_error("numerics.mode", found, expected, "Set numerics.mode=exact.")


CHECKS: tuple[Callable[[Experiment, Shape, Target], Iterable[UserError] | None], ...] = (
    _deepgemm,
    _engines,
    lambda e, shape, target: shared_memory_refusals(target),
    _compiler,
    _base,
    _kernels,
    lambda e, shape, target: native_refusals(e.numerics_config(), e.needs_engines, target),
    _layout,
    _optimizer,
    lambda e, shape, target: check_rows(e.trainer, e.numerics.mode, target.transformer_engine),
    _gates,
    _context,
    _cpu_heads,
)
"""The checks. Each yields its errors, or raises the first of them. No check relies on another one."""
