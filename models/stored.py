"""The safetensors files of a model directory against the table of the model's tensors, by their headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.architecture import Model
from models.storing import INDEX
from numerics.errors import UserError, user_error
from numerics.io.reading import parsed

FLOAT_DTYPES = ("BF16", "F16", "F32")
"""safetensors' names of what is read; it is rounded to the dtype that a side holds."""
SCANNED_BYTES = 2 << 30
"""Smaller weights are looked through for NaN at once; larger ones when they are loaded."""
_SPARE = ("rotary_emb.inv_freq",)
"""Endings of names that older files have and nothing reads."""


def check_stored(path: Path, model: Model, key: str = "model.path") -> None:
    """Whether the directory holds the tensors of `model`, no more and no less, in its shapes and as finite floats;
    those of draft layers may have any shape.

    Raises:
        UserError: there are no files, one is broken, or they are of another model; the message names the first tensor.
    """
    found: dict[str, tuple[int, ...]] = {}
    files = weight_files(path, key)
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():
                    held = stored.get_slice(name)
                    found[name] = tuple(held.get_shape())
                    if held.get_dtype() not in FLOAT_DTYPES:
                        raise _dtype_refusal(f"{key}: {name} in {file}", held.get_dtype())
        except (OSError, SafetensorError) as error:
            raise user_error(
                f"{key}: {file}", found=str(error), expected="a whole safetensors file", remedy="Copy the file again."
            ) from error
    for name, row in model.tensors.rows.items():
        if name not in found:
            raise _refusal(key, name, "no such tensor", f"one of shape {list(row.shape)}")
        if found[name] != row.shape:
            raise _refusal(key, name, f"shape {list(found[name])}", f"{list(row.shape)}")
    for name in sorted(found.keys() - model.tensors.rows.keys()):
        if not _is_spare(name, model):
            raise _refusal(key, name, f"a tensor of shape {list(found[name])}", "no such tensor")
    if sum(file.stat().st_size for file in files) <= SCANNED_BYTES:
        for name, tensor in stored_tensors(path, model, key):
            check_finite(name, tensor, key)


def stored_tensors(path: Path, model: Model, key: str = "model.path") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all that is in the table."""
    return _tensors(path, key, lambda name: name in model.tensors.rows)


def draft_tensors(path: Path, model: Model, key: str = "model.path") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the draft layers."""
    return _tensors(path, key, model.sizes.drafts)


def _tensors(path: Path, key: str, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    for file in weight_files(path, key):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():
                if wanted(name):
                    yield name, stored.get_tensor(name)


def check_finite(name: str, tensor: Tensor, key: str = "model.path") -> None:
    """Refuse a weight with values that no training could start from.

    Raises:
        UserError: some are NaN or infinite.
    """
    finite = torch.isfinite(tensor)
    if not finite.all():
        raise user_error(
            f"{key}: {name}",
            found=f"{int((~finite).sum())} of {tensor.numel()} values NaN or infinite",
            expected="finite weights",
            remedy="Use the weights of another checkpoint.",
        )


def weight_files(path: Path, key: str) -> list[Path]:
    """The files that the index names, or all where there is none.

    Raises:
        UserError: there are none, or the index is broken.
    """
    index = path / INDEX
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
    else:
        files = parsed(index, key, lambda values: sorted({path / name for name in values["weight_map"].values()}))
    if not files:
        raise user_error(
            key,
            found=f"{path} without *.safetensors",
            expected="safetensors weights",
            remedy="Convert the weights to safetensors; pickled weights are not read.",
        )
    return files


def _is_spare(name: str, model: Model) -> bool:
    tied = model.sizes.tied and name == "lm_head.weight"
    return name.endswith(_SPARE) or tied or model.sizes.drafts(name)


def _dtype_refusal(what: str, dtype: str) -> UserError:
    remedy = "Use the BF16 checkpoint of this model."
    return user_error(what, found=dtype, expected=" or ".join(FLOAT_DTYPES), remedy=remedy)


def _refusal(key: str, name: str, found: str, expected: str) -> UserError:
    return user_error(
        f"{key}: {name}",
        found=found,
        expected=f"{expected}, as config.json describes the model",
        remedy="The weights are those of another architecture: put the config.json and the weights of one model into "
        "the directory.",
    )
