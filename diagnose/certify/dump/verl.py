"""A batch of verl's: the tensors of its DataProto, saved as safetensors or npz.

verl itself writes texts (`trainer.rollout_data_dir`) and pickles (`DataProto.save_to_disk`), so a line in its trainer
saves the batch; docs/certify.md has it. Names and layout are those of verl at 0660408 (`verl/protocol.py`) and d163ff3
(`verl/trainer/ppo/ray_trainer.py`): prompts padded on the left, answers on the right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from fp8rl.diagnose.certify.dump.row import Sampling
from fp8rl.diagnose.certify.dump.source import Dump, whole
from fp8rl.models.storing import open_tensors
from fp8rl.numerics.errors import UserError, user_error
from fp8rl.numerics.sampling import Truncation

REQUIRED = frozenset({"input_ids", "attention_mask", "responses", "rollout_log_probs"})
_BY_TOKEN = ("rollout_log_probs", "old_log_probs", "response_mask")


def read(path: Path) -> Dump:
    """The rows of a file.

    Raises:
        UserError: it is damaged, or lacks a tensor.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                return from_tensors(path, {name: torch.from_numpy(stored[name]) for name in stored.files}, {})
        with open_tensors(path, "DUMP") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
            return from_tensors(path, tensors, stored.metadata() or {})
    except UserError:
        raise
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise user_error("DUMP", found=f"{path}: {error}", expected="a whole file", remedy="Write it again.") from None


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
    ids, real, answers = (tensors[name] for name in ("input_ids", "attention_mask", "responses"))
    shapes = {name: list(tensors[name].shape) for name in ("input_ids", "attention_mask", "responses")}
    shapes |= {name: list(tensors[name].shape) for name in _BY_TOKEN if name in tensors}
    fit = real.shape == ids.shape and ids.dim() == answers.dim() == 2 and len(ids) == len(answers)
    if not fit or any(tensors[name].shape != answers.shape for name in _BY_TOKEN if name in tensors):
        expected = "[B, P + R] of input_ids and attention_mask, [B, R] of the others"
        raise user_error("DUMP", found=f"{path} with {shapes}", expected=expected, remedy="Write it again.")
    width = ids.shape[1] - answers.shape[1]
    unread = [name for name in tensors if name not in {*REQUIRED, *_BY_TOKEN, "prompts", "position_ids"}]
    found = whole(path, "a batch of verl's", _rows(tensors, real.bool(), width), _sampling(path, said))
    return Dump(found.kind, found.rows, found.places, found.sampling, unread)


def _rows(tensors: Mapping[str, Tensor], real: Tensor, width: int) -> Iterator[tuple[str, dict[str, Any]]]:
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
        yield f"row {number}", values


def _sampling(path: Path, said: Mapping[str, str]) -> Sampling | None:
    try:
        numbers = {key: float(said[key]) for key in ("temperature", "top_p", "top_k", "min_p") if key in said}
    except ValueError as error:
        raise user_error("DUMP", found=f"{path}: {error}", expected="numbers", remedy="Write it again.") from None
    if not numbers:
        return None
    cut = Truncation(numbers.get("top_p", 1.0), int(numbers.get("top_k", -1)) or -1, numbers.get("min_p", 0.0))
    return Sampling(numbers.get("temperature", 1.0), cut)
