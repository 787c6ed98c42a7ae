"""What can be told before a process is started."""

from __future__ import annotations

from numerics.errors import UserError
from rl.diagnose.preflight.check import Check, judged, refused
from rl.experiment import Experiment
from rl.experiment.preconditions.model import check_model_layout
from trainer.hf_config import ModelShape


def block_alignment(model: ModelShape, experiment: Experiment) -> Check:
    """Whether every piece of a fused weight is whole quantization blocks on every rank.

    Otherwise trainer and engine quantize the same weights into different blocks, hence bytes.
    """
    name = "block alignment"
    try:
        check_model_layout(model, experiment)
    except UserError as error:
        return refused("bytes", name, error)
    width = "moe_intermediate_size" if model.moe else "intermediate_size"
    layout = ", ".join(f"{axis} {getattr(experiment.trainer, axis)}" for axis in ("tp", "ep", "dp"))
    sizes = f"hidden_size {model.hidden_size}, head_dim {model.head_dim}, {width} {model.ffn_size}"
    return Check("bytes", name, True, f"{sizes} on {layout}", "whole quantization blocks on every rank")


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
