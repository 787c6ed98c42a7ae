"""TransformerEngine's process environment, a check of the recipe that results from it, and access to the codes and
scales of parameters that TransformerEngine holds in FP8 (Float8BlockwiseQTensor).

Such a parameter looks like a BF16 tensor [N, K]. It holds `_rowwise_data`, the codes as uint8 [N, K], and
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


def check(lowering: Lowering, config: TransformerConfig) -> None:
    """Check that Megatron makes the lowering's recipe from `config`. Raises UserError: it makes another recipe."""
    if lowering.recipe is None:
        return
    from megatron.core.fp8_utils import get_fp8_recipe

    compare(lowering, get_fp8_recipe(config))


def switch(built: Lowering, wanted: Lowering, config: TransformerConfig) -> None:
    """Switch a model that was built with `built` to `wanted`, from the next forward pass on.

    With TransformerEngine, a model that was built in FP8 can switch to BF16 and back. Its weights stay in FP8.

    Raises:
        UserError: any other change. The model is then as before.
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
    """Return codes [N, K] and scales [N / 128, K / 128] of a parameter, views of its memory. N, K: whole blocks."""
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
    """Yield a parameter's codes and scales, row-wise and, if products have asked for them, column-wise. Its other
    tensors, such as the gradient and the master that Megatron attaches, are left out."""
    for name, value in vars(parameter).items():
        if name.startswith(("_rowwise_", "_columnwise_")) and value is not None:
            yield value


@torch.no_grad()
def fill(parameter: Any, values: Tensor) -> None:
    """Quantize BF16 `values` [N, K] into the parameter, and keep them there until the optimizer makes its master."""
    parameter.quantize_(values)
    if hasattr(parameter, "get_high_precision_init_val"):
        # What it returns. TransformerEngine put there what it initialised the parameter with.
        parameter._high_precision_init_val = values.cpu()
