"""The keys of `trainer.optimizer` in the words of Megatron's OptimizerConfig (0.16.1). Pure data."""

from __future__ import annotations

from typing import Any

import torch

from fp8rl.numerics.errors import user_error
from fp8rl.trainer.config import OptimizerMemory


def lower_optimizer(
    memory: OptimizerMemory, fp8_parameters: bool, cuda: bool, transformer_engine: bool
) -> dict[str, Any]:
    """Keywords of OptimizerConfig; none where masters and moments are FP32 where they compute.

    fp8_parameters: TransformerEngine holds weights in FP8. cuda: there is a GPU; without one the optimizer is on the
    host already.

    Raises:
        UserError: Megatron cannot do it with these.
    """
    if memory.offload and fp8_parameters:
        raise user_error(
            "trainer.optimizer.offload",
            found="true with weights that TransformerEngine holds and gathers in FP8, as in native mode",
            expected="one of the two: with both, Megatron leaves FP8 weights stale (Megatron-LM#2407, #2582, #2788)",
            remedy="Set trainer.optimizer.offload=false (moments=bf16 saves 4 bytes a parameter), "
            "numerics.trainer=bf16, or numerics.mode=exact.",
        )
    if memory.moments == "bf16" and not transformer_engine:
        raise user_error(
            "trainer.optimizer.moments",
            found="bf16",
            expected="fp32 where there is no TransformerEngine, whose Adam alone holds BF16 moments, or no GPU",
            remedy="Set trainer.optimizer.moments=fp32 here, or install requirements/gpu.txt beside a GPU.",
        )
    if memory.offload and cuda and not transformer_engine:
        raise user_error(
            "trainer.optimizer.offload",
            found="true without TransformerEngine",
            expected="it installed beside a GPU: Megatron's optimizer asks for it before it takes masters to the host",
            remedy="Install requirements/gpu.txt, or set trainer.optimizer.offload=false.",
        )
    # Precision-aware, the optimizer makes the masters itself: else Megatron keeps FP32 ones on the GPU besides.
    if memory.offload and cuda:
        return {
            "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
        }
    if memory.moments == "bf16":
        return {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": torch.bfloat16,
            "exp_avg_sq_dtype": torch.bfloat16,
            "store_param_remainders": False,  # masters are FP32 tensors, as without this key
        }
    return {}
