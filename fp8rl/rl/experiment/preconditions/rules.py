"""Rules that tie a spec to the sizes of its model and to the machines that it is for.

They start nothing and read no file: `train` and `doctor` hold a spec to them on this machine, and `plan` on GPUs that
nobody has yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from fp8rl.models.shape import Shape
from fp8rl.numerics.backend.implementation import (
    BLACKWELL,
    FEWEST_CAPABILITY,
    HOPPER,
    SMALL_CAPABILITY,
    deepgemm_lacks,
    implementation_for,
)
from fp8rl.numerics.core.errors import Rule, UserError, check_rules
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.rl.experiment.preconditions.gates import check_gate_layers
from fp8rl.rl.experiment.preconditions.target import PlannedRun, Target, dotted
from fp8rl.trainer.megatron.lowering import by_mx, lower, lower_optimizer
from fp8rl.trainer.megatron.model_checks import check_engine_layout, check_layout, check_rows, check_training


def _lacks_for_deepgemm(run: PlannedRun) -> str | None:
    asked = run.experiment.numerics.mode == "exact" and run.experiment.numerics.deepgemm and run.target.known
    return deepgemm_lacks(run.target.capability, run.target.deepgemm) if asked else None


DEEPGEMM: tuple[Rule[PlannedRun], ...] = (
    Rule(
        "numerics.deepgemm",
        _lacks_for_deepgemm,
        lambda c: f"true, and no {_lacks_for_deepgemm(c)} here",
        "a Hopper GPU and DeepGEMM",
        "Set numerics.deepgemm=false: products run on our kernels, with the same results.",
    ),
)
"""Its bits are compared where it is to run."""

OnGpus = tuple[Experiment, bool]
"""A spec, and whether its machines have GPUs."""


def _one_rank(key: str, width: Callable[[Experiment], int]) -> Rule[OnGpus]:
    return Rule(
        key,
        lambda s: width(s[0]) > 1 and (s[0].numerics.mode == "exact") is s[1],
        lambda s: f"{width(s[0])} with numerics.mode={s[0].numerics.mode} on {'GPUs' if s[1] else 'CPUs'}",
        "1 there",
        lambda s: f"Set {key}=1, or numerics.mode={'native' if s[1] else 'exact'}.",
    )


ENGINE_RANKS: tuple[Rule[OnGpus], ...] = (
    _one_rank("rollout.tp", lambda e: e.rollout.tp),
    _one_rank("teacher.tp", lambda e: 1 if e.teacher is None else e.teacher.tp),
)
"""On GPUs no exact engine of several ranks has run yet; on CPUs, native engines have one."""

SLEEPERS: tuple[Rule[PlannedRun], ...] = (
    Rule(
        "rollout.sleep",
        lambda c: c.target.gpus and c.experiment.rollout.sleep and c.experiment.rollout.tp > 1,
        lambda c: f"true with rollout.tp={c.experiment.rollout.tp} on GPUs",
        "engines of one rank: larger ones have GPUs of their own, where sleeping frees no memory for the trainer",
        "Set rollout.sleep=false, or rollout.tp=1.",
    ),
)

BASE: tuple[Rule[PlannedRun], ...] = (
    Rule(
        "sync.shared_base",
        lambda c: (
            c.target.gpus
            and c.experiment.sync.shared_base
            and (c.experiment.trainer.world_size, c.experiment.rollout.engines) != (1, 1)
        ),
        lambda c: (
            f"true with {c.experiment.trainer.world_size} trainer rank(s) and {c.experiment.rollout.engines} engine(s) "
            "on GPUs"
        ),
        "one trainer rank and one engine, on one GPU: the base lies there, and no other GPU computes with it",
        "Set sync.shared_base=false, or trainer.tp, pp, dp and cp to 1 and rollout.engines to 1.",
    ),
)

ALLOCATOR: tuple[Rule[Target], ...] = (
    Rule(
        "PYTORCH_ALLOC_CONF",
        lambda t: t.gpus and t.known and t.expandable_segments,
        lambda t: t.expandable_segments,
        "no expandable segments: trainer and engine share memory by CUDA IPC, and a sleeping engine releases it",
        "Unset the variable, or take expandable_segments out of it.",
    ),
)

COMPILER: tuple[Rule[PlannedRun], ...] = (
    Rule(
        "CUDA_HOME",
        lambda c: c.experiment.needs_engines and c.target.other_compilers,
        lambda c: f"nvcc: {c.target.other_compilers}",
        f"one of CUDA {torch.version.cuda}, as torch is built for: an engine makes kernels of SGLang's as it starts",
        "Install that toolkit (`make install-gpu` brings its compiler), or set CUDA_HOME to it.",
    ),
)

KERNELS: tuple[Rule[PlannedRun], ...] = (
    Rule(
        "numerics.mode",
        lambda c: c.lacking,
        lambda c: f"exact with {c.lacking[0][0]} {c.on_gpus}",
        lambda c: c.lacking[0][1],
        "Set numerics.mode=native, or take other GPUs.",
    ),
    Rule(
        "numerics.preset",
        lambda c: (
            c.experiment.needs_engines
            and not c.has_kernels
            and implementation_for(HOPPER, c.experiment.numerics_config().spec) == "torch"
        ),
        lambda c: f"{c.experiment.numerics.preset} with numerics.mode=exact on GPUs",
        "weights in blocks of 128, activations and gradients in token groups of 128, for which there are kernels",
        lambda c: f"Set numerics.preset=fp8_block_pow2, or numerics.mode=native{_bf16_engine(c.experiment)}.",
    ),
    Rule(
        "numerics.mode",
        lambda c: c.experiment.needs_engines and not c.has_kernels,
        lambda c: f"exact {c.on_gpus}",
        f"{dotted(FEWEST_CAPABILITY)} to 11.x: earlier ones have no FP8, and later ones too little shared memory for "
        "a tile of the exact kernels",
        lambda c: f"Set numerics.mode=native{_bf16_below(FEWEST_CAPABILITY, c.exact_on)}, or take other GPUs.",
    ),
)


def _bf16_engine(experiment: Experiment) -> str:
    """Return what native mode needs beside it where SGLang has no products for the weights of its engine."""
    spec = experiment.numerics_config().rollout_spec
    return " numerics.rollout=bf16" if spec.quantized and spec.weight.mx else ""


def _bf16_below(least: tuple[int, int], capability: tuple[int, int] | None) -> str:
    return " numerics.trainer=bf16 numerics.rollout=bf16" if capability and capability < least else ""


def _native(
    key: str,
    is_used: Callable[[PlannedRun], object],
    whose: str,
    least: tuple[int, int],
    below: tuple[int, int] | None = None,
) -> Rule[PlannedRun]:
    return Rule(
        key,
        lambda c: c.native_on and is_used(c) and not least <= c.native_on < (below or (99, 0)),
        lambda c: f"fp8 with numerics.mode=native {c.on_gpus}",
        f"{dotted(least)} or higher{f', below {dotted(below)}' if below else ''}, for {whose}",
        f"Set {key}=bf16, or take other GPUs.",
    )


NATIVE_PRODUCTS: tuple[Rule[PlannedRun], ...] = (
    _native(
        "numerics.rollout",
        lambda c: c.experiment.needs_engines and c.experiment.numerics_config().rollout_spec.quantized,
        "SGLang's kernels",
        FEWEST_CAPABILITY,
    ),
    _native(
        "numerics.trainer",
        lambda c: c.trains_on_te and by_mx(c.trains_on_te),
        "TransformerEngine's MXFP8",
        BLACKWELL,
        SMALL_CAPABILITY,
    ),
    _native(
        "numerics.trainer",
        lambda c: c.trains_on_te and not by_mx(c.trains_on_te),
        "TransformerEngine's blocks of 128",
        HOPPER,
    ),
    Rule(
        "numerics.preset",
        lambda c: c.trains_on_te and c.native_on and c.native_on >= BLACKWELL and c.trains_on_te.weight.scale != "pow2",
        lambda c: f"FP32 scales with numerics.mode=native {c.on_gpus}",
        "scales that are powers of two: these GPUs compute blocks of 128 as MX",
        "Set numerics.preset=fp8_block_pow2.",
    ),
)
"""FP8 products of native mode are those of SGLang and TransformerEngine, which ask for such GPUs."""

LAYOUT: tuple[Rule[PlannedRun], ...] = (
    Rule(
        "trainer.pp",
        lambda c: c.experiment.trainer.pp > 1 and c.experiment.numerics.router_replay != "off",
        lambda c: f"{c.experiment.trainer.pp} with numerics.router_replay={c.experiment.numerics.router_replay}",
        "1: a pipeline stage has only the routers of its own layers",
        "Set trainer.pp=1, or numerics.router_replay=off.",
    ),
    Rule(
        "numerics.router_replay",
        lambda c: c.experiment.numerics.router_replay != "off" and not c.sizes.moe,
        lambda c: c.experiment.numerics.router_replay,
        "off for a dense model, which has no experts",
        "Set numerics.router_replay=off, or choose a mixture of experts.",
    ),
)

CONTEXT: tuple[Rule[PlannedRun], ...] = (
    Rule(
        "rollout.context_length",
        lambda c: c.experiment.rollout.context_length > c.sizes.max_positions,
        lambda c: c.experiment.rollout.context_length,
        lambda c: f"at most {c.sizes.max_positions}, the model's {c.sizes.limit}",
        lambda c: f"Set rollout.context_length={c.sizes.max_positions} or less.",
    ),
    Rule(
        "rollout.max_new_tokens",
        lambda c: c.experiment.rollout.max_new_tokens >= c.experiment.rollout.context_length,
        lambda c: c.experiment.rollout.max_new_tokens,
        lambda c: (
            f"less than rollout.context_length = {c.experiment.rollout.context_length}, which holds the prompt too"
        ),
        "Lower rollout.max_new_tokens or raise rollout.context_length.",
    ),
    Rule(
        "rollout.max_total_tokens",
        lambda c: c.experiment.rollout.cache_tokens < c.experiment.rollout.context_length,
        lambda c: c.experiment.rollout.cache_tokens,
        lambda c: f"at least rollout.context_length = {c.experiment.rollout.context_length}",
        "Raise rollout.max_total_tokens or lower rollout.context_length.",
    ),
)

CPU_HEADS: tuple[Rule[PlannedRun], ...] = (
    Rule(
        "numerics.mode",
        lambda c: (
            c.target.known
            and not c.target.gpus
            and c.experiment.numerics.mode == "native"
            and c.sizes.cpu_head_dim not in (0, c.sizes.head_dim)
        ),
        lambda c: (
            f"native on CPUs, with heads of {c.sizes.head_dim} in a model of {c.sizes.heads} heads and hidden_size "
            f"= {c.sizes.hidden_size}"
        ),
        lambda c: f"heads of hidden_size / heads = {c.sizes.cpu_head_dim}, which SGLang's own model takes on a CPU",
        "Set numerics.mode=exact.",
    ),
)


def check_model_layout(shape: Shape, experiment: Experiment) -> None:
    """Check that the model splits into tp, pp, ep and dp parts of whole quantization blocks. Raises UserError."""
    check_rules(LAYOUT, PlannedRun(experiment, shape, Target(gpus=False, transformer_engine=False)))
    numerics = experiment.numerics_config()
    check_layout(shape, experiment.trainer, numerics.blocks_spec)
    check_training(shape, experiment.trainer, numerics.trainer_spec)
    check_engine_layout(shape, experiment.rollout.tp, numerics.blocks_spec)


def _check_engines(run: PlannedRun) -> None:
    if run.target.known:
        check_rules(ENGINE_RANKS, (run.experiment, run.target.gpus))
        check_rules(SLEEPERS, run)


def _check_optimizer(run: PlannedRun) -> None:
    target = run.target
    lowered = lower(run.experiment.numerics_config(), target.transformer_engine)
    held_in_fp8 = bool(lowered.ddp.get("fp8_param_gather"))
    lower_optimizer(run.experiment.trainer.optimizer, held_in_fp8, target.gpus, target.transformer_engine)


def _check_rows(run: PlannedRun) -> None:
    experiment, mode = run.experiment, run.experiment.numerics.mode
    check_rows(experiment.trainer, mode, run.target.transformer_engine, experiment.rollout.context_length)


CHECKS: tuple[Callable[[PlannedRun], None], ...] = (
    partial(check_rules, DEEPGEMM),
    _check_engines,
    lambda run: check_rules(ALLOCATOR, run.target),
    partial(check_rules, COMPILER),
    partial(check_rules, BASE),
    partial(check_rules, KERNELS),
    partial(check_rules, NATIVE_PRODUCTS),
    lambda run: check_model_layout(run.shape, run.experiment),
    _check_optimizer,
    _check_rows,
    lambda run: check_gate_layers(run.experiment, run.sizes),
    partial(check_rules, CONTEXT),
    partial(check_rules, CPU_HEADS),
)
"""Each raises `UserError` for the first of its rules that a spec breaks; they do not rely on each other."""


def check_target(experiment: Experiment, shape: Shape, target: Target) -> None:
    """Raise `UserError` for the first rule that the spec does not keep with such a model on such machines."""
    for check in CHECKS:
        check(PlannedRun(experiment, shape, target))


def broken_rules(experiment: Experiment, shape: Shape, target: Target) -> Iterator[UserError]:
    """Return the first refusal of each check that the spec does not pass."""
    for check in CHECKS:
        try:
            check(PlannedRun(experiment, shape, target))
        except UserError as refusal:
            yield refusal
