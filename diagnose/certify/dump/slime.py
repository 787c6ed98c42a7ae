"""slime's dumps: `--save-debug-rollout-data` has the engine's log-probabilities, `--save-debug-train-data` both sides'.

Both are `torch.save` of plain values (slime at 4c4adbb, `slime/observability/rollout_data_utils.py` and
`train_data_utils.py`; before, `slime/utils/train_dump_utils.py`, 429eb3d). They are opened as weights are, which runs
no code of the file's.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8rl.diagnose.certify.dump import verl
from fp8rl.diagnose.certify.dump.source import Dump, whole
from fp8rl.numerics.errors import UserError, user_error

_OURS = {"rollout_log_probs": "logprobs", "log_probs": "trainer_logprobs"}
_RECONSTRUCT = np.zeros(0).__reduce__()[0]
_ARRAYS: list[Any] = [
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    np.ndarray,
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("int16", "int32", "int64", "uint8", "float32", "float64")),
]
"""What arrays of numbers are made of: routed experts stand in some of the dumps."""


def read(path: Path) -> Dump:
    """The rows of a dump of slime's, or of a dictionary of verl's tensors that torch has saved.

    Raises:
        UserError: it is neither, or holds other than plain values.
    """
    values = _opened(path)
    if verl.REQUIRED <= values.keys():
        return verl.from_tensors(path, values, {})
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
        values = {key: _plain(value) for key, value in sample.items()}
        if values.get("status") in ("aborted", "pending"):
            continue
        yield place, _row(values)


def _row(values: dict[str, Any]) -> dict[str, Any]:
    """A sample in our schema; what is missing stays so, and is named when the row is checked."""
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
    """The samples of columns, which are lists as long as `tokens`."""
    tokens = columns.get("tokens")
    if not isinstance(tokens, list):
        raise _closed(path, "rollout_data without a list of tokens")
    whole_columns = {k: v for k, v in columns.items() if isinstance(v, list) and len(v) == len(tokens)}
    return [{key: column[index] for key, column in whole_columns.items()} for index in range(len(tokens))]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value
