"""Reads the safetensors files of a model directory, and checks their headers against the model's table of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.architecture import Model, read_model
from fp8rl.models.checkpoint.stored import CODES, WeightFiles, check_scales, how_dequantized, is_scales
from fp8rl.models.checkpoint.writing import INDEX
from fp8rl.models.multimodal import Multimodal
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.reading import parsed

FLOAT_DTYPES = ("BF16", "F16", "F32")
"""safetensors' names of the dtypes that are read unchanged, and then rounded to the dtype of trainer or engine."""
SCANNED_BYTES = 2 << 30
"""A model of at most this many bytes is searched for NaN when it is checked, a larger one when it is loaded."""
WHOLE_MODEL = "model.safetensors"
"""The file of a model that has no index."""
_COPY_ALL = "Copy the index and the files of the model again."
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_SPARE = ("rotary_emb.inv_freq",)
"""Endings of the names of tensors in older files that no code reads."""


def check_stored(
    path: Path, model: Model, key: str = "model.path", say: Callable[[str], object] = lambda text: None
) -> None:
    """Check that the directory holds exactly the tensors of `model`, in its shapes, as finite floats or as matrices in
    FP8 with a scale for each block. Tensors that are only kept may have any shape.

    say: called with sentences on how weights in FP8 are read and what happens to an image encoder.

    Raises UserError: there are no files, a file is broken, or the files are of another model; the message names the
    first wrong tensor.
    """
    found: dict[str, tuple[int, ...]] = {}
    coded: list[str] = []
    paths = weight_files(path, key)
    files = WeightFiles(paths, key, model.multimodal)
    for name, file in files.where.items():
        found[name], dtype = files.described(name)
        if dtype == CODES:
            check_scales(name, files, key)
            coded.append(name)
        elif dtype not in FLOAT_DTYPES:
            expected, remedy = " or ".join((*FLOAT_DTYPES, CODES)), "Use the BF16 checkpoint of this model."
            raise user_error(f"{key}: {name} in {file}", found=dtype, expected=expected, remedy=remedy)
    for name, row in model.tensors.rows.items():
        if name not in found:
            raise _refusal(key, name, "no such tensor", f"one of shape {list(row.shape)}")
        if found[name] != row.shape:
            raise _refusal(key, name, f"shape {list(found[name])}", f"{list(row.shape)}")
    for name in sorted(found.keys() - model.tensors.rows.keys()):
        spare = name.endswith(_SPARE) or model.sizes.keeps(name) or (model.sizes.tied and name == _OUTPUT)
        if not spare and not is_scales(name, files):
            raise _unexpected(key, name, found[name], model)
    if model.sizes.tied and _OUTPUT in found:  # nothing would read another one
        output, embedding = files.read(_OUTPUT), files.read(_EMBEDDING)
        if output.shape != embedding.shape or not torch.equal(output.float(), embedding.float()):
            expected = "the same, as tie_word_embeddings of config.json is true"
            remedy = "Set tie_word_embeddings to false in config.json, or remove the tensor if it is a leftover."
            raise user_error(f"{key}: {_OUTPUT}", f"weights other than {_EMBEDDING}", expected, remedy)
    if coded:
        say(how_dequantized(coded, files))
        if other := _other_choice(set(coded), model):
            say(other)
    if model.multimodal is not None:
        say(_of_tower(path, files, model.sizes.tower, model.multimodal))
    if sum(file.stat().st_size for file in paths) <= SCANNED_BYTES:
        for name, tensor in stored_tensors(path, model, key):
            check_finite(name, tensor, key)


def stored_tensors(path: Path, model: Model, key: str = "model.path") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all tensors of the table, in BF16 where the files have FP8."""
    return _tensors(path, key, lambda name: name in model.tensors.rows)


def starting_weights(
    path: Path, model: Model, device: torch.device | None = None, part: int = 0, parts: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the table's tensors, rounded to the dtype that trainer and engines start with. device:
    the tensors' device. part, parts: yield share `part` of `parts` shares of the tensors. Raises UserError: some values
    are not finite."""
    mine = set(sorted(model.tensors.rows)[part::parts])
    for name, tensor in _tensors(path, "model.path", mine.__contains__):
        here = tensor.to(device)
        check_finite(name, here)
        yield name, here.to(model.tensors[name].served)


def kept_tensors(path: Path, model: Model, key: str = "model.path") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the tensors that no side uses, such as draft layers, in BF16 where files have FP8."""
    return _tensors(path, key, model.sizes.keeps)


def _other_choice(coded: set[str], model: Model) -> str:
    """Describe how the matrices in FP8 differ from the matrices that a spec can quantize; empty: they do not differ."""
    may = {row.name for row in model.tensors.rows.values() if row.product and row.kind is not None}
    never, plain = (coded & model.tensors.rows.keys()) - may, may - coded
    found = [(plain, "in BF16 that specs can quantize"), (never, "in FP8 that no spec can quantize")]
    kinds = [f"{len(names)} {what}, such as {min(names)}" for names, what in found if names]
    return f"the model has matrices {', and '.join(kinds)}; both sides quantize by the run's spec" if kinds else ""


def stored_files(path: Path, key: str = "model.path") -> WeightFiles:
    """Open the files of a directory. Tensors have the names of its model's table."""
    return WeightFiles(weight_files(path, key), key, read_model(path, key, served=True).multimodal)


def _of_tower(path: Path, files: WeightFiles, name: str, multimodal: Multimodal) -> str:
    """Describe the image encoder (tower) of a checkpoint whose architecture is `name`, and what happens to it."""
    shapes = [files.described(tensor)[0] for tensor in files.where if tensor.startswith(multimodal.towers)]
    numbers = sum(map(math.prod, shapes))
    return (
        f"{path} is a {name}: its text model is trained and served. Its tower for pictures "
        f"({len(shapes)} tensors, {numbers:,} numbers) is not used, and is copied into models that a run writes"
    )


def _tensors(path: Path, key: str, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    files = stored_files(path, key)
    for name in files.where:
        if wanted(name) and not is_scales(name, files):
            yield name, files.read(name)


def check_finite(name: str, tensor: Tensor, key: str = "model.path") -> None:
    """Check that all values of a weight are finite. Raises UserError if some are NaN or infinite."""
    finite = torch.isfinite(tensor)
    if not finite.all():
        found = f"{int((~finite).sum())} of {tensor.numel()} values NaN or infinite"
        raise user_error(f"{key}: {name}", found, "finite weights", "Use the weights of another checkpoint.")


def weight_files(path: Path, key: str) -> list[Path]:
    """Return the files that the index names, or all files if there is no index. Each tensor is in one file. Raises
    UserError if there are no files, if a file is broken, or if files and index disagree about the model's weights."""
    listed = _listed(path / INDEX, key)
    present = sorted(path.glob("*.safetensors"))
    files = sorted({path / name for name in listed.values()}) if listed else present
    if not files:
        remedy = "Convert the weights to safetensors; pickled weights are not read."
        raise user_error(key, f"{path} without *.safetensors", "safetensors weights", remedy)
    if absent := [file for file in files if not file.is_file()]:
        found = f"{absent[0].name}, which is not in {path}"
        raise user_error(f"{key}: {INDEX}", found=found, expected="files that are there", remedy=_COPY_ALL)
    if listed and (whole := path / WHOLE_MODEL) in present and whole not in files:
        raise _two_models(key, f"{whole} beside {INDEX}, which does not name it")
    file_of: dict[str, Path] = {}
    for file in sorted({*files, *present}):
        for name in WeightFiles([file], key).where:
            if (other := file_of.setdefault(name, file)) != file:
                raise _two_models(key, f"{name} in {other.name} and in {file.name} of {path}")
    for name, wanted in listed.items():
        if file_of.get(name) != path / wanted:
            raise user_error(f"{key}: {INDEX}", f"{name} in {wanted}", "a tensor that the file has", _COPY_ALL)
    for name, place in file_of.items():
        if listed and place in files and name not in listed:
            raise user_error(f"{key}: {INDEX}", f"no {name}", f"all tensors of {place.name}", _COPY_ALL)
    return files


def _listed(index: Path, key: str) -> dict[str, str]:
    """Return the name of each tensor's file, from the index; empty: there is no index."""
    if not index.is_file():
        return {}

    def named(values: dict[str, Any]) -> dict[str, str]:
        found = dict(values["weight_map"])
        if outside := [name for name in found.values() if not isinstance(name, str) or Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} is no name of a file beside the index")
        return found

    return parsed(index, key, named)


def _two_models(key: str, found: str) -> UserError:
    """Return an error for a directory with the weights of two models. Libraries differ in which one they load."""
    remedy = "Remove the files that are not the model's from the directory."
    return user_error(key, found=found, expected="each tensor in one file", remedy=remedy)


def _unexpected(key: str, name: str, shape: tuple[int, ...], model: Model) -> UserError:
    layers, found = model.sizes.layers, f"a tensor of shape {list(shape)}"
    if not re.match(rf"model\.layers\.{layers + model.sizes.draft_layers}\.", name):
        return _refusal(key, name, found, "no such tensor")
    return user_error(
        f"{key}: {name}",
        found=f"{found} after the {layers} layers and {model.sizes.draft_layers} draft layers of config.json",
        expected="no such tensor",
        remedy="If it is of a draft layer (multi-token prediction), set num_nextn_predict_layers in config.json; if "
        "not, the weights belong to another architecture: put the config.json and the weights of one model into the "
        "directory.",
    )


def _refusal(key: str, name: str, found: str, expected: str) -> UserError:
    remedy = (
        "The weights belong to another architecture, or are not whole: put the config.json and all weights of "
        "one model into the directory."
    )
    return user_error(f"{key}: {name}", found, f"{expected}, as config.json describes the model", remedy)
