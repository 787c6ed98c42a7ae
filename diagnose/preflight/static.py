"""What can be told before a process is started."""

from __future__ import annotations

from fp8rl.diagnose.preflight.check import Check, judged, refused
from fp8rl.models import ModelSizes
from fp8rl.numerics.errors import UserError
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.rules import check_model_layout


def block_alignment(sizes: ModelSizes, experiment: Experiment) -> Check:
    """Whether every piece of a fused weight is whole quantization blocks on every rank.

    Otherwise trainer and engine quantize the same weights into different blocks, hence bytes.
    """
    name = "block alignment"
    try:
        check_model_layout(sizes, experiment)
    except UserError as error:
        return refused("bytes", name, error)
    held = {
        "hidden_size": sizes.hidden_size,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.ffn_size,
        "moe_intermediate_size": sizes.expert_size,
    }
    said = ", ".join(f"{name} {size}" for name, size in held.items() if size)
    layout = ", ".join(f"{axis} {getattr(experiment.trainer, axis)}" for axis in ("tp", "pp", "ep", "dp"))
    return Check("bytes", name, True, f"{said} on {layout}", "whole quantization blocks on every rank")


def same_precision(experiment: Experiment) -> Check:
    """Whether both sides run the spec, or both BF16."""
    sides = {"trainer": experiment.numerics.trainer != "bf16", "rollout": experiment.numerics.rollout != "bf16"}
    return judged(
        "spec",
        "precision of both sides",
        sides["trainer"] == sides["rollout"],
        found=f"numerics.trainer={experiment.numerics.trainer}, numerics.rollout={experiment.numerics.rollout}",
        expected="FP8 on both sides or BF16 on both sides",
        remedy=SAME_PRECISION,
    )


SAME_PRECISION = "Run both sides in one precision: numerics.trainer=fp8 numerics.rollout=fp8, or bf16 for both."
