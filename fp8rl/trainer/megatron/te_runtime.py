"""TransformerEngine's process environment, the check of the recipe that it made of it, and the parameters that it holds
in FP8 (its Float8BlockwiseQTensor), with their codes and scales as they are.

Such a parameter looks like a BF16 tensor [N, K]. Inside are `_rowwise_data`, the codes as uint8 [N, K], and
`_rowwise_scale_inv`, FP32 [N / 128, K / 128 padded to a multiple of 4], besides transposed copies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from fp8rl.trainer.megatron.lowering import Lowering

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

_FORMATS = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2"}


def prepare(lowering: Lowering) -> None:
    """Set the variables that TransformerEngine reads when it is imported. Importing Megatron imports it, so call this
    before.

    In a process that has imported it this is too late and changes nothing; `check` then finds out.
    """
    if "transformer_engine" in sys.modules:
        return
    for name, value in lowering.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def check(lowering: Lowering, config: TransformerConfig) -> None:
    """Compare the recipe that Megatron makes of `config` with the lowering. Raises UserError: TransformerEngine would
    compute something else."""
    if lowering.recipe is None:
        return
    from megatron.core.fp8_utils import get_fp8_recipe

    compare(lowering, get_fp8_recipe(config))


def switch(built: Lowering, wanted: Lowering, config: TransformerConfig) -> None:
    """Let a model that was built with `built` compute as `wanted` from the next forward on.

    With TransformerEngine, one that was built in FP8 may compute in BF16 and in FP8 again. Its weights stay in FP8.

    Raises:
        UserError: another change; nothing has changed then.
    """
    if not built.transformer_engine:
        return
    if wanted.recipe is not None and wanted != built:
        expected = f"{dict(built.config)}, which the model was built with, or BF16"
        remedy = "Start a new trainer: TransformerEngine's layers keep the FP8 that they were built with."
        raise user_error("numerics", dict(wanted.config), expected, remedy)
    config.fp8 = wanted.config.get("fp8")


def compare(lowering: Lowering, recipe: object) -> None:
    """Raise `UserError` unless `recipe` is the lowering's."""
    kind, expected = type(recipe).__name__, lowering.recipe or {}
    found: dict[str, Any] = {}
    for name in expected if kind == lowering.recipe_kind else ():  # dotted; None if an older version lacks it
        found[name] = reduce(lambda part, attribute: getattr(part, attribute, None), name.split("."), recipe)
    differing = {name: value for name, value in found.items() if value != expected[name]}
    if kind == lowering.recipe_kind and not differing:
        return
    settings = " ".join(f"{name}={value}" if value else f"{name} unset" for name, value in lowering.environment.items())
    raise user_error(
        "TransformerEngine's FP8 recipe",
        found=differing or kind,
        expected=str({name: expected[name] for name in differing} or lowering.recipe_kind),
        remedy=f"It reads its settings when it is imported: start the process with {settings}, and with "
        "TransformerEngine 2.20.",
    )


def is_quantized(parameter: Tensor) -> bool:
    """Return True if TransformerEngine holds this parameter in FP8."""
    return hasattr(parameter, "_rowwise_scale_inv")


def quantized(parameter: Any) -> QuantizedTensor:
    """Return codes [N, K] and scales [N / 128, K / 128] of a parameter of whole blocks; they share its memory."""
    assert parameter._is_2D_scaled, "weights have one scale per block"
    spec = TensorSpec(
        format=_FORMATS[parameter._fp8_dtype.name],  # type: ignore[arg-type]
        granularity="block",
        scale="pow2" if parameter._quantizer.force_pow_2_scales else "fp32",
    )
    rows, columns = (size // spec.group for size in parameter.shape)
    codes = parameter._rowwise_data.view(spec.dtype).view(parameter.shape)
    return QuantizedTensor(codes, parameter._rowwise_scale_inv[:rows, :columns], spec)


def stored(parameter: Tensor) -> Iterator[Tensor]:
    """Yield the codes and scales of a parameter: by rows, and by columns where products have asked for them. Megatron
    hangs gradients and masters on it as well."""
    for name, value in vars(parameter).items():
        if name.startswith(("_rowwise_", "_columnwise_")) and value is not None:
            yield value


@torch.no_grad()
def fill(parameter: Any, values: Tensor) -> None:
    """Quantize BF16 `values` [N, K] into the parameter, and leave them for the optimizer to make its master from."""
    parameter.quantize_(values)
    if hasattr(parameter, "get_high_precision_init_val"):
        # What it returns. TransformerEngine put there what it initialised the parameter with.
        parameter._high_precision_init_val = values.cpu()
