"""Triton's interpreter as these tests use it: it adds up in one order, and leaves out work of which nothing is kept."""

import dataclasses
import inspect
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder


def _in_order(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    # Cast before: einsum casts number by number, which takes it twenty times as long.
    a, b = (np.ascontiguousarray(x, dtype=dtype) for x in (a, b))
    return np.einsum("...ik,...kj->...ij", a, b)


_create_dot = InterpreterBuilder.create_dot


def _create_dot_in_order(*args: Any) -> Any:
    """Adds up every row in one order, as a GPU does. The interpreter leaves that to BLAS, where on some processors the
    order depends on where in a tile a row lies."""
    with mock.patch.object(np, "matmul", _in_order):
        return _create_dot(*args)


_patch_lang = interpreter._patch_lang


def _patch_lang_once(fn: Any) -> Any:
    """Every call of a device function replaces the language's functions again, a third of the time of most kernels.
    Those of a launch stay replaced until it ends."""
    if any(tl.core.is_builtin(lang.load) for lang in _languages(fn)):
        return _patch_lang(fn)
    return interpreter._LangPatchScope()


@cache
def _languages(fn: Any) -> list[Any]:
    """The modules of Triton's language that a function sees."""
    return [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]


_get_np_dtype = interpreter._get_np_dtype


@cache
def _np_dtype(scalar: tl.dtype) -> np.dtype:
    return _get_np_dtype(scalar)


def _get_np_dtype_once(tt_dtype: tl.dtype) -> np.dtype:
    pointer = isinstance(tt_dtype.scalar, tl.pointer_type)
    return np.dtype(np.uint64) if pointer else _np_dtype(tt_dtype.scalar)


InterpreterBuilder.create_dot = _create_dot_in_order
interpreter._patch_lang = _patch_lang_once
interpreter._get_np_dtype = _get_np_dtype_once
# Whether integers overflow is computed beside each sum and product, and dropped, since `debug` is off.
interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
