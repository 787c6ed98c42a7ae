"""Chooses whether elementwise functions are compiled (torch.compile, C++ on a CPU) or run as they are written.

A process chooses once, at its start. Only functions whose result is exact in every order of evaluation are decorated.
So both choices give the same bits, and two processes may choose differently.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

_enabled = False


def enable_compiler() -> bool:
    """Compile decorated functions from now on, if a small function compiles here. Return whether it does."""
    global _enabled
    import torch._dynamo.config as dynamo
    import torch._inductor.codecache as codecache
    import torch._inductor.config as inductor
    import torch.fx.experimental._config as shapes

    inductor.compile_threads = 1  # no pool of compiler processes beside a trainer or an engine
    inductor.cpp.vec_isa_ok = True  # trust the CPU's flags: trying each instruction set takes a process
    # Not in a process's own temporary folder. A header that two write at once, under a lock each, is broken: a compiler
    # that reads it takes all memory.
    codecache._HEADER_DIR = os.path.join(codecache.cache_dir(), "precompiled_headers")
    codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")
    dynamo.recompile_limit = 64  # a size of 1 is compiled apart, for each dimension
    shapes.use_duck_shape = False  # sizes that happen to be equal in one call are not the same in the next
    _enabled = _enabled or _compiles()
    return _enabled


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run decorated functions as they are written inside the block, so that each of their ops can be watched."""
    global _enabled
    enabled, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = enabled


def _compiles() -> bool:
    """Return whether a small function compiles. Without a C++ compiler or a writable cache only speed is lost."""
    x = torch.arange(64.0)
    try:
        return torch.equal(torch.compile(_twice)(x), _twice(x))
    except Exception as error:
        logger.warning("torch.compile does not work here, so quantizers run uncompiled (slower, same bits): %s", error)
        return False


def _twice(x: Tensor) -> Tensor:
    return x + x


def compilable(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function of tensors as one that `enable_compiler` may compile. The result has no gradient."""
    compiled: list[Callable[P, R]] = []  # made at the first call: torch's compiler takes 3 s to import

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            if not _enabled:
                return function(*args, **kwargs)
            # To the compiler, gradients, views and strides make variants, each of which costs seconds once.
            plain: Any = [x.detach().contiguous() if isinstance(x, Tensor) else x for x in args]
            if not compiled:
                compiled.append(torch.compile(function, dynamic=True))
            return compiled[0](*plain, **kwargs)

    return call
