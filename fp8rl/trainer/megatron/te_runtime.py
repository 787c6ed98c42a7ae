"""Sets TransformerEngine's environment variables, checks the recipe that results, and reads and writes the codes and
scales of parameters that TransformerEngine stores in FP8 (Float8BlockwiseQTensor).

Such a parameter looks like a BF16 tensor [N, K]. It has the codes in `_rowwise_data`, uint8 [N, K], the scales in
`_rowwise_scale_inv`, FP32 [N / 128, K / 128 padded to a multiple of 4], and transposed copies of both.
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
    """Set the environment variables that TransformerEngine reads at import. Call this before importing Megatron, which
    imports TransformerEngine.

    If TransformerEngine is imported already, this has no effect, and `check` reports it.
    """
    if "transformer_engine" in sys.modules:
        return
    for name, value in lowering.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def switch(built: Lowering, wanted: Lowering, config: TransformerConfig) -> None:
    """Switch a model that was built with the lowering `built` to `wanted`, from the next forward pass on.

    With TransformerEngine, a model that was built in FP8 can switch to BF16 products and back. Its weights stay in FP8.

    Raises UserError: the change is another one. The model has not changed.
    """
    if not built.transformer_engine:
        return
    if wanted.recipe is not None and wanted != built:
        expected = f"{dict(built.config)}, with which the model was built, or BF16"
        remedy = "Start a new trainer, because TransformerEngine's layers cannot change their FP8 format."
        raise user_error("numerics", dict(wanted.config), expected, remedy)
    config.fp8 = wanted.config.get("fp8")


def check(lowering: Lowering, recipe: object) -> None:
    """Check that Megatron has made the recipe of `lowering`. Raises UserError: `recipe` is another one."""
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
        remedy=f"Start the process with {settings}, because TransformerEngine reads these settings when it is "
        "imported. Use TransformerEngine 2.20.",
    )


def is_quantized(parameter: Tensor) -> bool:
    """Return True if TransformerEngine stores this parameter in FP8."""
    return hasattr(parameter, "_rowwise_scale_inv")


def quantized(parameter: Any) -> QuantizedTensor:
    """Return a parameter's codes [N, K] and scales [N / 128, K / 128], views of its memory. 128 must divide N and K."""
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
    """Yield a parameter's codes and scales: the row-wise ones, and the column-wise ones if products have made them.
    Other tensors of the parameter, such as the gradient and the master that Megatron attaches, are left out."""
    for name, value in vars(parameter).items():
        if name.startswith(("_rowwise_", "_columnwise_")) and value is not None:
            yield value


@torch.no_grad()
def fill(parameter: Any, values: Tensor) -> None:
    """Quantize BF16 `values` [N, K] into the parameter. It keeps the values until the optimizer makes its master."""
    parameter.quantize_(values)
    if hasattr(parameter, "get_high_precision_init_val"):
        # What it returns. TransformerEngine put there what it initialised the parameter with.
        parameter._high_precision_init_val = values.cpu()
