"""Reads tensors of safetensors files by their names in a model's table, in whatever form they are stored.

A checkpoint such as DeepSeek-V3's has a weight's FP8 codes under the weight's name. One FP32 scale for each block of
128 x 128 is under this name + `_scale_inv`, perhaps in another file. Trainer and engines start from codes times scales
in BF16, and quantize these weights again by the run's quantization spec. If a scale is a power of two, its products are
exact in BF16; other products are rounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.checkpoint.writing import open_tensors
from fp8rl.models.multimodal import Multimodal, Piece
from fp8rl.models.tensors import FP8_BLOCK, SCALE_SUFFIX
from fp8rl.numerics.core.errors import user_error

CODES = "F8_E4M3"
"""safetensors' name of the dtype of codes."""


class WeightFiles:
    """The tensors of safetensors files by name, whichever file they are in. Files stay open while this object exists.

    multimodal: how the files hold the model and an image encoder; None: they hold only the model, by its table's names.

    Raises UserError: from the constructor, for a file that is missing or broken; the message calls the file `key`.
    """

    def __init__(self, files: Iterable[Path], key: str, multimodal: Multimodal | None = None) -> None:
        self._open: dict[Path, Any] = {file: open_tensors(file, key) for file in files}
        where = {name: file for file, opened in self._open.items() for name in opened.keys()}
        self.pieces = {name: Piece(name) for name in where}
        """By tensor: the piece of the files that holds it."""
        if multimodal is not None:
            slices = ((name, self._open[file].get_slice(name)) for name, file in where.items())
            self.pieces = multimodal.names({name: tuple(part.get_shape()) for name, part in slices})
        self.where = {name: where[piece.name] for name, piece in self.pieces.items()}
        """The file of each tensor, in the files' order."""

    def described(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape of a tensor, and safetensors' name of its dtype, from its file's header."""
        piece = self.pieces[name]
        stored = self._open[self.where[name]].get_slice(piece.name)
        return piece.shape or tuple(stored.get_shape()), stored.get_dtype()

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored, or in BF16 if it is stored in FP8."""
        tensor = self.stored(name)
        return dequantized(tensor, self.stored(name + SCALE_SUFFIX)) if tensor.dtype == torch.float8_e4m3fn else tensor

    def stored(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        file, piece = self._open[self.where[name]], self.pieces[name]
        if not piece.of:
            return file.get_tensor(piece.name)
        return file.get_slice(piece.name)[piece.expert, piece.first : piece.after]


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    """Multiply codes E4M3 [N, K] with scales [ceil(N / 128), ceil(K / 128)] in FP32. Return BF16 [N, K]."""
    rows, columns = codes.shape
    factors = scales.float().repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return (codes.float() * factors).bfloat16()


def is_scales(name: str, files: WeightFiles) -> bool:
    """Return whether a tensor is the scales of a weight in FP8."""
    weight = name.removesuffix(SCALE_SUFFIX)
    return weight != name and weight in files.where and files.described(weight)[1] == CODES


def check_scales(name: str, files: WeightFiles, key: str) -> None:
    """Check that a weight in FP8 has a scale for each of its blocks. Raises `UserError`."""
    (shape, _), scales = files.described(name), name + SCALE_SUFFIX
    expected = [-(-size // FP8_BLOCK) for size in shape]
    found = list(files.described(scales)[0]) if scales in files.where else None
    if len(shape) != 2 or found != expected:
        raise user_error(
            f"{key}: {name}",
            found=f"{CODES} of shape {list(shape)} with scales of shape {found}",
            expected=f"scales of shape {expected}, one for each block of {FP8_BLOCK} x {FP8_BLOCK}",
            remedy="Use the BF16 checkpoint of this model.",
        )


def how_dequantized(names: Iterable[str], files: WeightFiles) -> str:
    """Describe how these weights in FP8 are read, and whether that rounds their values."""
    scales = (files.stored(name + SCALE_SUFFIX).float() for name in names)
    lossless = [bool((torch.frexp(each).mantissa == 0.5).all()) for each in scales]  # powers of two
    text = f"{len(lossless)} weights of the model are in FP8, and both sides start from them in BF16: "
    if all(lossless):
        return text + "their scales are powers of two, so that no value changes"
    return text + f"values of {lossless.count(False)} are rounded, as their scales are no powers of two"
