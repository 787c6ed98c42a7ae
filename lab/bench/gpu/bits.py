"""The bits of libraries' FP8 products, for every number of rows that a run multiplies.

A library may stand in for our kernels where all its numbers are ours. Where they are not, it may still serve a product
that no other process repeats, if a row's numbers do not depend on how many rows there are.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.quantize import quantize_rows
from fp8rl.numerics.quantize import QuantizedTensor, quantize
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch, random
from lab.bench.gpu.products import BLOCKS, ROWS, Product, deepgemm_library, differ, scaled_mm


def run(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    libraries: dict[str, Product] = {"torch._scaled_mm": scaled_mm}
    if importlib.util.find_spec("deep_gemm") is None:
        done.leave_out("DeepGEMM", "not installed: deep_gemm (the package sgl-deep-gemm)")
    elif watch.device.type == "cpu":
        done.leave_out("DeepGEMM", "it needs a GPU")
    else:
        libraries["DeepGEMM"] = deepgemm_library().dense
    compare(done, sizes, watch, libraries)


def compare(done: Measured, sizes: Sizes, watch: Stopwatch, libraries: dict[str, Product]) -> None:
    """A row for each product, library and number of rows; those that most depends on come first."""
    most = max(sizes.multiplied)
    for shape in sizes.dense:
        codes = quantize(random(shape.n, shape.k, device=watch.device, scale=0.02), BLOCKS)
        x = random(most, shape.k, device=watch.device)
        ours = gemm(quantize_rows(x, ROWS), codes, torch.bfloat16)
        for name, product in libraries.items():
            whole = _product(done, name, product, quantize_rows(x, ROWS), codes)
            if whole is None:
                continue
            for rows in sizes.multiplied:
                # Quantized anew: the scales of some rows of a larger matrix lie apart.
                found = _product(done, f"{name}, {rows} rows", product, quantize_rows(x[:rows], ROWS), codes)
                if found is not None:
                    what = {"product": shape.name, "library": name, "rows": rows, "numbers": found.numel()}
                    done.row(
                        what
                        | {"not ours": differ(found, ours[:rows]), "not as among most": differ(found, whole[:rows])}
                    )


def _product(done: Measured, name: str, product: Product, a: QuantizedTensor, b: QuantizedTensor) -> Tensor | None:
    try:
        return product(a, b)
    except (RuntimeError, ValueError, NotImplementedError) as error:  # not every library takes every number of rows
        done.leave_out(name, str(error).splitlines()[0][:200])
        return None
