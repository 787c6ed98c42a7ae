"""Rules that tie a spec to the sizes of its model and to the machines that it is for.

They start nothing and read no file: `train` and `doctor` hold a spec to them on this machine, and `plan` on GPUs that
nobody has yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fp8rl.models import ModelSizes
from fp8rl.numerics.backend.implementation import (
    FEWEST_CAPABILITY,
    SMALL_CAPABILITY,
    capability_of,
    deepgemm_lacks,
    has_deepgemm,
    implementation_for,
)
from fp8rl.numerics.errors import UserError, user_error
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.rl.experiment.preconditions.model import check_model_layout
from fp8rl.rollout.config import check_drafts
from fp8rl.trainer.device import has_transformer_engine
from fp8rl.trainer.megatron.lowering import by_mx, lower, lower_optimizer
from fp8rl.trainer.megatron.model_checks import check_packing, check_sharing

HOPPER, BLACKWELL = (9, 0), (10, 0)
BLOCKS = "TransformerEngine's blocks of 128"


@dataclass(frozen=True)
class Target:
    """The machines that a run is for.

    Attributes:
        gpus: they have some. capability: compute capability of these; None: nobody knows it here.
        transformer_engine, deepgemm: they are installed there.
        known: False for a cluster that is not ours, whose machines are looked at when the run is placed on them.
    """

    gpus: bool
    transformer_engine: bool
    deepgemm: bool = True
    capability: tuple[int, int] | None = None
    known: bool = True

    @classmethod
    def here(cls) -> Target:
        """This machine; where RAY_ADDRESS names a cluster, as far as it tells of that."""
        gpus, known = torch.cuda.is_available(), "RAY_ADDRESS" not in os.environ
        capability = capability_of("cuda") if gpus and known else None
        return cls(gpus, has_transformer_engine(), has_deepgemm(), capability, known)


def check_engine_ranks(experiment: Experiment, gpus: bool) -> None:
    """Raise `UserError` for engines of several ranks on GPUs in exact mode, whose captured CUDA graphs cannot hold what
    they exchange, or on CPUs in native mode."""
    mode, where = experiment.numerics.mode, "GPUs" if gpus else "CPUs"
    teacher = 1 if experiment.teacher is None else experiment.teacher.tp
    for key, width in (("rollout.tp", experiment.rollout.tp), ("teacher.tp", teacher)):
        if width > 1 and (mode == "exact") is gpus:
            raise user_error(
                key,
                found=f"{width} with numerics.mode={mode} on {where}",
                expected="1 there",
                remedy=f"Set {key}=1, or numerics.mode={'native' if gpus else 'exact'}.",
            )


def _engine_ranks(experiment: Experiment, sizes: ModelSizes, target: Target) -> None:
    if not target.known:
        return
    check_engine_ranks(experiment, target.gpus)
    if target.gpus and experiment.rollout.sleep and experiment.rollout.tp > 1:
        raise user_error(
            "rollout.sleep",
            found=f"true with rollout.tp={experiment.rollout.tp} on GPUs",
            expected="engines of one rank: wider ones have GPUs of their own, where they make room for nobody",
            remedy="Set rollout.sleep=false, or rollout.tp=1.",
        )


def _kernels(experiment: Experiment, sizes: ModelSizes, target: Target) -> None:
    """Exact engines on GPUs need kernels: the definitions in torch do not run in a CUDA graph."""
    spec, capability = experiment.numerics_config().spec, target.capability
    if experiment.numerics.mode == "native" or capability is None:
        return
    kernels = implementation_for(capability, spec) == "triton"
    if kernels and sizes.latent is not None and capability < HOPPER:
        raise user_error(
            "numerics.mode",
            found=f"exact with latent attention on GPUs of compute capability {_dotted(capability)}",
            expected="9.0 to 11.x: its kernels need 170 KiB of shared memory, and these have 99",
            remedy="Set numerics.mode=native, or take other GPUs.",
        )
    if kernels or not experiment.needs_engines:
        return
    if implementation_for(HOPPER, spec) == "torch":
        raise user_error(
            "numerics.preset",
            found=f"{experiment.numerics.preset} with numerics.mode=exact on GPUs",
            expected="weights in blocks of 128, activations and gradients in token groups of 128, which kernels know",
            remedy="Set numerics.preset=fp8_block_pow2, or numerics.mode=native.",
        )
    bf16 = "" if capability >= FEWEST_CAPABILITY else " numerics.trainer=bf16 numerics.rollout=bf16"
    raise user_error(
        "numerics.mode",
        found=f"exact on GPUs of compute capability {_dotted(capability)}",
        expected=f"{_dotted(FEWEST_CAPABILITY)} to 11.x: earlier ones have no FP8, and later ones too little shared "
        "memory for a tile of the exact kernels",
        remedy=f"Set numerics.mode=native{bf16}, or take other GPUs.",
    )


def _native_products(experiment: Experiment, sizes: ModelSizes, target: Target) -> None:
    """FP8 products of native mode are those of SGLang and TransformerEngine, which ask for such GPUs."""
    numerics, capability = experiment.numerics_config(), target.capability
    if numerics.mode != "native" or capability is None:
        return
    trainer, mx = numerics.trainer_spec, by_mx(numerics.trainer_spec)
    wanted = []
    if experiment.needs_engines and numerics.rollout_spec.quantized:
        wanted.append(("numerics.rollout", "SGLang's kernels", FEWEST_CAPABILITY, None))
    if target.transformer_engine and trainer.quantized:
        of_trainer = ("TransformerEngine's MXFP8", BLACKWELL, SMALL_CAPABILITY) if mx else (BLOCKS, HOPPER, None)
        wanted.append(("numerics.trainer", *of_trainer))
    for key, whose, least, below in wanted:
        if capability < least or (below is not None and capability >= below):
            raise user_error(
                key,
                found=f"fp8 with numerics.mode=native on GPUs of compute capability {_dotted(capability)}",
                expected=f"{_dotted(least)} or higher{f', below {_dotted(below)}' if below else ''}, for {whose}",
                remedy=f"Set {key}=bf16, or take other GPUs.",
            )
    if target.transformer_engine and capability >= BLACKWELL and trainer.quantized and trainer.weight.scale != "pow2":
        raise user_error(
            "numerics.preset",
            found=f"FP32 scales with numerics.mode=native on GPUs of compute capability {_dotted(capability)}",
            expected="scales that are powers of two, as these multiply blocks of 128 as MX",
            remedy="Set numerics.preset=fp8_block_pow2.",
        )


def _deepgemm(experiment: Experiment, sizes: ModelSizes, target: Target) -> None:
    """DeepGEMM, if it is asked for, needs a Hopper GPU; its bits are compared where it is to run."""
    asked = experiment.numerics.mode == "exact" and experiment.numerics.deepgemm and target.known
    if asked and (lacking := deepgemm_lacks(target.capability, target.deepgemm)):
        raise user_error(
            "numerics.deepgemm",
            found=f"true, and no {lacking} here",
            expected="a Hopper GPU and DeepGEMM",
            remedy="Set numerics.deepgemm=false: products run on our kernels, with the same results.",
        )


def _drafts(experiment: Experiment, sizes: ModelSizes, target: Target) -> None:
    check_drafts(experiment.rollout.speculation, target.gpus)


def _layout(experiment: Experiment, sizes: ModelSizes, target: Target) -> None:
    check_model_layout(sizes, experiment)


def _optimizer(experiment: Experiment, sizes: ModelSizes, target: Target) -> None:
    lowered = lower(experiment.numerics_config(), target.transformer_engine)
    held_in_fp8 = bool(lowered.ddp.get("fp8_param_gather"))
    lower_optimizer(experiment.trainer.optimizer, held_in_fp8, target.gpus, target.transformer_engine)


def _rows(experiment: Experiment, sizes: ModelSizes, target: Target) -> None:
    mode = experiment.numerics.mode
    check_packing(experiment.trainer.packing, mode, target.transformer_engine)
    check_sharing(experiment.trainer, mode, experiment.rollout.context_length)


def _context(experiment: Experiment, sizes: ModelSizes, target: Target) -> None:
    rollout = experiment.rollout
    if rollout.context_length > sizes.max_positions:
        raise user_error(
            "rollout.context_length",
            found=rollout.context_length,
            expected=f"at most {sizes.max_positions}, the model's max_position_embeddings",
            remedy=f"Set rollout.context_length={sizes.max_positions} or less.",
        )
    if rollout.max_new_tokens >= rollout.context_length:
        raise user_error(
            "rollout.max_new_tokens",
            found=rollout.max_new_tokens,
            expected=f"less than rollout.context_length = {rollout.context_length}, which holds the prompt too",
            remedy="Lower rollout.max_new_tokens or raise rollout.context_length.",
        )
    if rollout.cache_tokens < rollout.row_tokens:
        behind = "" if rollout.speculation is None else f" and {rollout.speculation.reserve} tokens for drafts"
        raise user_error(
            "rollout.max_total_tokens",
            found=rollout.cache_tokens,
            expected=f"at least rollout.context_length = {rollout.context_length}{behind}",
            remedy="Raise rollout.max_total_tokens or lower rollout.context_length.",
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


Rule = Callable[[Experiment, ModelSizes, Target], None]
RULES: tuple[Rule, ...] = (
    _deepgemm,
    _drafts,
    _engine_ranks,
    _kernels,
    _native_products,
    _layout,
    _optimizer,
    _rows,
    _context,
)
"""Each raises `UserError` where a spec cannot run with such a model on such machines."""


def check_rules(experiment: Experiment, sizes: ModelSizes, target: Target) -> None:
    """Raise `UserError` for the first rule that the spec does not keep."""
    for rule in RULES:
        rule(experiment, sizes, target)


def broken_rules(experiment: Experiment, sizes: ModelSizes, target: Target) -> Iterator[UserError]:
    """The refusal of each rule that the spec does not keep."""
    for rule in RULES:
        try:
            rule(experiment, sizes, target)
        except UserError as refusal:
            yield refusal
