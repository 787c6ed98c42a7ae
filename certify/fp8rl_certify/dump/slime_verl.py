"""Reads a batch of verl, the tensors of its DataProto saved as safetensors or npz, and dumps of slime.

verl itself writes only texts (`trainer.rollout_data_dir`) and pickles (`DataProto.save_to_disk`), so a line in its
trainer must save the batch; docs/certify.md has the line. Names and layout are as in verl at 0660408
(`verl/protocol.py`) and d163ff3 (`verl/trainer/ppo/ray_trainer.py`): prompts padded on the left, answers on the right.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8rl.models.checkpoint.writing import open_tensors
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl_certify.dump.rows import Dump, whole

REQUIRED = frozenset({"input_ids", "attention_mask", "responses", "rollout_log_probs"})
_BY_TOKEN = ("rollout_log_probs", "old_log_probs", "response_mask")


def read_verl(path: Path) -> Dump:
    """Read the rows of a file with a batch of verl.

    Raises:
        UserError: the file is damaged, or lacks a tensor.
    """
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as stored:
            return from_tensors(path, {name: torch.from_numpy(stored[name]) for name in stored.files}, {})
    with open_tensors(path, "DUMP") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        return from_tensors(path, tensors, stored.metadata() or {})


def from_tensors(path: Path, tensors: Mapping[str, Any], said: Mapping[str, str]) -> Dump:
    """Return the rows of a batch. said: temperature, top_p and top_k, if the file has them in addition to tensors."""
    missing = sorted(REQUIRED - tensors.keys())
    if missing:
        remedy = "Save the whole batch, after old_log_probs are known; with rollout_log_probs if "
        raise user_error(
            "DUMP",
            found=f"{path} without {', '.join(missing)}, with {', '.join(sorted(tensors)[:12])}",
            expected="the tensors of a batch of verl's",
            remedy=remedy + "actor_rollout_ref.rollout.calculate_log_probs=true.",
        )
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
    tensors: Mapping[str, Tensor], real: Tensor, width: int, settings: dict[str, Any]
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
        yield f"row {number}", values | settings


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
"""The functions and classes in pickled arrays of numbers. They are allowed, as some dumps have routed experts so."""


def read_slime(path: Path) -> Dump:
    """Read the rows of a dump of slime, or of a dictionary of verl's tensors that torch has saved.

    Raises:
        UserError: the file is neither of them, or has other than plain values.
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
        with torch.serialization.safe_globals(_ARRAYS):
            values = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), str(error)[:160])
        raise _closed(path, reason) from None
    except (OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
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
        arrays = (torch.Tensor, np.ndarray)
        values = {key: value.tolist() if isinstance(value, arrays) else value for key, value in sample.items()}
        if values.get("status") in ("aborted", "pending"):
            continue
        yield place, _slime_row(values)


def _slime_row(values: dict[str, Any]) -> dict[str, Any]:
    """Return a sample in our schema. A missing key stays missing; the check of the row names it."""
    tokens, length = values.get("tokens"), values.get("response_length", values.get("response_lengths"))
    row: dict[str, Any] = {ours: values[theirs] for theirs, ours in _OURS.items() if values.get(theirs) is not None}
    if tokens is not None:
        row["tokens"] = tokens
        if isinstance(length, int):
            row["prompt_length"] = len(tokens) - length
    mask = values.get("loss_mask", values.get("loss_masks"))
    if mask is not None:
        row["mask"] = mask
    versions = list(dict.fromkeys(values.get("weight_versions") or []))
    return row | ({"version": ", ".join(map(str, versions))} if versions else {})


def _transposed(path: Path, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the samples from columns, which are lists as long as `tokens`."""
    tokens = columns.get("tokens")
    if not isinstance(tokens, list):
        raise _closed(path, "rollout_data without a list of tokens")
    whole_columns = {k: v for k, v in columns.items() if isinstance(v, list) and len(v) == len(tokens)}
    return [{key: column[index] for key, column in whole_columns.items()} for index in range(len(tokens))]
