"""Whether elementwise kernels are compiled (torch.compile, C++ on a CPU) or run as they are written.

A process chooses once, at its start. Only functions whose result is exact in every order of evaluation are decorated,
so both choices give the same bits, and two processes need not choose alike.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_enabled = False


def enable_compiler() -> bool:
    """Compile decorated functions from now on, if there is a C++ compiler or a GPU. Returns whether it will."""
    global _enabled
    if torch.cuda.is_available() or shutil.which(os.environ.get("CXX", "g++")):
        import torch._dynamo.config as dynamo
        import torch._inductor.config as inductor
        import torch.fx.experimental._config as shapes

        inductor.compile_threads = 1  # no pool of compiler processes beside a trainer or an engine
        dynamo.recompile_limit = 64  # a size of 1 is compiled apart, for each dimension
        shapes.use_duck_shape = False  # sizes that happen to be equal in one call are not the same in the next
        _enabled = True
    return _enabled


def compilable(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function of tensors as one that `enable_compiler` may compile."""
    compiled = torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (compiled if _enabled else function)(*args, **kwargs)

    return call
