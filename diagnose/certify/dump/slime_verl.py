"""A batch of verl's: the tensors of its DataProto, saved as safetensors or npz.

verl itself writes texts (`trainer.rollout_data_dir`) and pickles (`DataProto.save_to_disk`), so a line in its trainer
saves the batch; docs/certify.md has it. Names and layout are those of verl at 0660408 (`verl/protocol.py`) and d163ff3
(`verl/trainer/ppo/ray_trainer.py`): prompts padded on the left, answers on the right.
"""

from __future__ import annotations

import lzma
import pickle
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from fp8rl.diagnose.certify.dump.rows import Dump, whole
from fp8rl.models.checkpoint.writing import open_tensors
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.reading import LARGEST

REQUIRED = frozenset({"input_ids", "attention_mask", "responses", "rollout_log_probs"})
_BY_TOKEN = ("rollout_log_probs", "old_log_probs", "response_mask")


def read_verl(path: Path) -> Dump:
    """The rows of a file.

    Raises:
        UserError: it is damaged, or lacks a tensor.
    """
    if path.suffix == ".npz":
        return from_tensors(path, _arrays(path), {})
    with open_tensors(path, "DUMP") as stored:
        try:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise _damaged(path, error) from None
        return from_tensors(path, tensors, stored.metadata() or {})


def _arrays(path: Path) -> dict[str, Tensor]:
    try:
        check_unpacked(path)
        with np.load(path, allow_pickle=False) as stored:
            return {name: torch.from_numpy(stored[name]) for name in stored.files}
    except _DAMAGED as error:
        raise _damaged(path, error) from None


_DAMAGED = (
    *(
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        EOFError,
        MemoryError,
        ArithmeticError,
        RuntimeError,
    ),
    *(SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)
"""What numpy and zipfile raise where an archive is cut, flipped or no archive, or a header of it is no header."""


def check_unpacked(path: Path) -> None:
    """Refuse an archive that takes far more memory than its file.

    Raises:
        ValueError: it does.
    """
    with zipfile.ZipFile(path) as archive:
        size = sum(each.file_size for each in archive.infolist())
    if size > max(LARGEST, path.stat().st_size):
        raise ValueError(f"{size:,} bytes when it is unpacked, more than {LARGEST:,}")


def _damaged(path: Path, error: Exception) -> UserError:
    found = f"{path}: {type(error).__name__}: {error}".splitlines()[0]
    return user_error("DUMP", found=found, expected="a whole file", remedy="Write it again.")


def plain(value: Any) -> bool:
    """Return whether a value is a tensor of numbers in memory, which has rows."""
    return (
        isinstance(value, Tensor)
        and not (value.is_nested or value.is_quantized or value.is_meta)
        and value.layout is torch.strided
    )


def from_tensors(path: Path, tensors: Mapping[str, Any], said: Mapping[str, str]) -> Dump:
    """The rows of a batch. said: temperature, top_p and top_k, where the file has them beside its tensors."""
    missing = sorted(REQUIRED - tensors.keys())
    if missing:
        remedy = "Save the whole batch, after old_log_probs are known; with rollout_log_probs if "
        raise user_error(
            "DUMP",
            found=f"{path} without {', '.join(missing)}, with {', '.join(sorted(tensors)[:12])}",
            expected="the tensors of a batch of verl's",
            remedy=remedy + "actor_rollout_ref.rollout.calculate_log_probs=true.",
        )
    if odd := [name for name in (*REQUIRED, *_BY_TOKEN) if name in tensors and not plain(tensors[name])]:
        found = f"{path} with {odd[0]}, which is no plain tensor"
        raise user_error("DUMP", found=found, expected="tensors of numbers", remedy="Write it again.")
    ids, real, answers = (tensors[name] for name in ("input_ids", "attention_mask", "responses"))
    shapes = {name: list(tensors[name].shape) for name in ("input_ids", "attention_mask", "responses")}
    shapes |= {name: list(tensors[name].shape) for name in _BY_TOKEN if name in tensors}
    fit = real.shape == ids.shape and ids.dim() == answers.dim() == 2 and len(ids) == len(answers)
    if not fit or any(tensors[name].shape != answers.shape for name in _BY_TOKEN if name in tensors):
        expected = "[B, P + R] of input_ids and attention_mask, [B, R] of the others"
        raise user_error("DUMP", found=f"{path} with {shapes}", expected=expected, remedy="Write it again.")
    width = ids.shape[1] - answers.shape[1]
    unread = [name for name in tensors if name not in {*REQUIRED, *_BY_TOKEN, "prompts", "position_ids"}]
    settings = {key: said[key] for key in ("temperature", "top_p", "top_k", "min_p") if key in said}
    found = whole(path, "a batch of verl's", _verl_rows(tensors, real.bool(), width, settings))
    return Dump(found.kind, found.rows, found.places, None, unread)


def _verl_rows(
    tensors: Mapping[str, Tensor], real: Tensor, width: int, settings: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    names = {"rollout_log_probs": "logprobs", "old_log_probs": "trainer_logprobs", "response_mask": "mask"}
    for number in range(len(real)):
        length = int(real[number, width:].sum())
        if not length:
            continue
        values: dict[str, Any] = {
            ours: tensors[theirs][number, :length].tolist() for theirs, ours in names.items() if theirs in tensors
        }
        values["tokens"] = tensors["input_ids"][number][real[number]].tolist()
        values["prompt_length"] = len(values["tokens"]) - length
        yield f"row {number}", values | dict(settings)


# slime's dumps: `--save-debug-rollout-data` has the engine's log-probabilities, `--save-debug-train-data` both sides'.
#
# Both are `torch.save` of plain values (slime at 4c4adbb, `slime/observability/rollout_data_utils.py` and
# `train_data_utils.py`; before, `slime/utils/train_dump_utils.py`, 429eb3d). They are opened as weights are, which runs
# no code of the file's.

_OURS = {"rollout_log_probs": "logprobs", "log_probs": "trainer_logprobs"}
_RECONSTRUCT = np.zeros(0).__reduce__()[0]
_ARRAYS: list[Any] = [
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    np.ndarray,
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("int16", "int32", "int64", "uint8", "float32", "float64")),
]
"""The parts of pickled arrays of numbers: routed experts stand in some of the dumps."""


def read_slime(path: Path) -> Dump:
    """The rows of a dump of slime's, or of a dictionary of verl's tensors that torch has saved.

    Raises:
        UserError: it is neither, or holds other than plain values.
    """
    values = _opened(path)
    if REQUIRED <= values.keys():
        return from_tensors(path, values, {})
    if isinstance(values.get("samples"), list):
        return whole(path, "a dump of slime's", _samples(path, values["samples"]))
    if isinstance(values.get("rollout_data"), dict):
        return whole(path, "a dump of slime's", _samples(path, _transposed(path, values["rollout_data"])))
    raise user_error(
        "DUMP",
        found=f"{path} with {', '.join(map(str, list(values)[:8]))}",
        expected="slime's samples or rollout_data, or verl's tensors",
        remedy="Give a file of --save-debug-rollout-data or --save-debug-train-data.",
    )


def _opened(path: Path) -> dict[str, Any]:
    try:
        if zipfile.is_zipfile(path):
            check_unpacked(path)
        with torch.serialization.safe_globals(_ARRAYS):
            values = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), str(error)[:160])
        raise _closed(path, reason) from None
    except _DAMAGED as error:
        raise _closed(path, f"{type(error).__name__}: {error}".splitlines()[0][:160]) from None
    if not isinstance(values, dict):
        raise _closed(path, f"a {type(values).__name__}")
    return values


def _closed(path: Path, reason: str) -> UserError:
    return user_error(
        "DUMP",
        found=f"{path}: {reason}",
        expected="numbers, texts, lists, dictionaries and tensors, saved by torch",
        remedy="Save plain values, or rows in JSON; docs/certify.md has the schema.",
    )


def _samples(path: Path, samples: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, sample in enumerate(samples):
        place = f"sample {number}"
        if not isinstance(sample, Mapping):
            raise _closed(path, f"{place}, a {type(sample).__name__}")
        values = {k: v.tolist() if plain(v) or isinstance(v, np.ndarray) else v for k, v in sample.items()}
        if values.get("status") in ("aborted", "pending"):
            continue
        yield place, _slime_row(values)


def _slime_row(values: dict[str, Any]) -> dict[str, Any]:
    """A sample in our schema; what is missing stays so, and is named when the row is checked."""
    tokens, length = values.get("tokens"), values.get("response_length", values.get("response_lengths"))
    row: dict[str, Any] = {ours: values[theirs] for theirs, ours in _OURS.items() if values.get(theirs) is not None}
    if tokens is not None:
        row["tokens"] = tokens
        if isinstance(length, int) and isinstance(tokens, list):
            row["prompt_length"] = len(tokens) - length
    mask = values.get("loss_mask", values.get("loss_masks"))
    if mask is not None:
        row["mask"] = mask
    versions = values.get("weight_versions") or []
    named = dict.fromkeys(map(str, versions if isinstance(versions, list) else [versions]))
    return row | ({"version": ", ".join(named)} if named else {})


def _transposed(path: Path, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The samples of columns, which are lists as long as `tokens`."""
    tokens = columns.get("tokens")
    if not isinstance(tokens, list):
        raise _closed(path, "rollout_data without a list of tokens")
    whole_columns = {k: v for k, v in columns.items() if isinstance(v, list) and len(v) == len(tokens)}
    return [{key: column[index] for key, column in whole_columns.items()} for index in range(len(tokens))]
