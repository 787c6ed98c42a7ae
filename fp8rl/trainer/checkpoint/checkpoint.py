"""Saves and loads checkpoints. A checkpoint is complete or absent, and loads on any parallel layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.memory import give_back
from fp8rl.numerics.core.process import together
from fp8rl.trainer.checkpoint.files import CONTENT, STATE, About, check_digests, discard, read_about
from fp8rl.trainer.checkpoint.pickles import read_metadata, safe_pickles
from fp8rl.trainer.checkpoint.writer import Staged
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.distributed.optimizer import Optimizer

ADAPTER, BASE = "adapter", "base"
"""ADAPTER: the key of `About.extra` for a description of the adapters. BASE: its key for the digest of their base."""
JOINED = "joined_heads"
"""The key of `About.extra` for `ModelSizes.joined`, the order of rows of queries, keys and values. Without it: 1."""
_EXTRA = "_extra_state"
"""In names of entries with the history of a TransformerEngine recipe. Block scaling has no history."""


@dataclass(frozen=True)
class Trained:
    """The trained parts of one model."""

    model: GPTModel
    optimizer: Optimizer
    layout: Layout
    adapter: dict[str, Any] | None = None
    """A description of the adapters, with the digest of the frozen weights. None if the weights are trained."""


Parts = Mapping[str, Trained]
"""The models of a checkpoint, by name. The policy has the name `""`."""


def stage(path: Path, parts: Parts, step: int, extra: dict[str, Any], texts: Mapping[str, str]) -> Staged:
    """Copy the contents of a checkpoint to separate memory. Each rank then writes its part from there.

    A checkpoint has weights or adapters, FP32 masters, moments, schedule, step, `extra` (JSON values) and `texts` (more
    files, by name). If `extra[CONTENT]` is "weights", it has no masters and moments. All ranks take part. Training may
    go on before the files are written. The directory `path` appears complete or not at all. An existing directory is
    replaced.
    """
    if dist.get_rank() == 0:
        discard(path)
    dist.barrier()
    give_back()  # so that the copy takes the place of what the step has left
    contents = {name: text.encode() for name, text in texts.items()}
    if (adapter := _adapter_of(parts)) is not None:
        extra = {**extra, ADAPTER: adapter}
    if (joined := _joined(parts)) > 1:
        extra = {**extra, JOINED: joined}
    return Staged(path, About(step, extra, {}), contents, _copied(_state(parts, step, extra, loading=False)))


def load(path: Path, parts: Parts) -> tuple[int, dict[str, Any]]:
    """Restore a checkpoint. It may have been written on another layout. All ranks take part.

    Returns:
        The step, and the `extra` given to `stage`.

    Raises:
        UserError: `path` has no checkpoint, or its checkpoint has another format, other adapters or another base.
        DamagedCheckpointError: a file is not as it was written. Nothing was loaded.
    """
    path = Path(path).absolute()
    for part in parts.values():
        part.optimizer.host_copy.check_onloaded()
    about = read_about(path)
    _check_adapter(path, about.extra.get(ADAPTER), _adapter_of(parts))
    if (found := about.extra.get(JOINED, 1)) != (expected := _joined(parts)):
        raise user_error(
            f"checkpoint {path}: {JOINED}",
            found=found,
            expected=f"{expected}, as this version of fp8rl orders the rows of queries, keys and values",
            remedy="Resume with the version of fp8rl that wrote it, or start a new run from its model.",
        )
    names = sorted(about.files)
    together(lambda: check_digests(path, names[dist.get_rank() :: dist.get_world_size()]))  # each rank its share
    with safe_pickles(path):
        read_metadata(path / STATE / ".metadata")
        state = dist_checkpointing.load(_state(parts, about.step, about.extra, loading=True), str(path / STATE))
    for name, part in parts.items():
        _restore(part, state[name] if name else state)
    return about.step, {key: value for key, value in about.extra.items() if key not in (ADAPTER, JOINED)}


def _joined(parts: Parts) -> int:
    """Return `ModelSizes.joined`: how many key-value heads have their rows together in a fused parameter."""
    return max(part.model.joined for part in parts.values())


def _adapter_of(parts: Parts) -> dict[str, Any] | None:
    """Return the description of the adapters, which is the same in all parts. None without adapters."""
    return next((part.adapter for part in parts.values()), None)


def _check_adapter(path: Path, found: dict[str, Any] | None, expected: dict[str, Any] | None) -> None:
    """Raise `UserError` if a checkpoint has other adapters or another base than the run."""
    if found == expected:
        return
    if found is None or expected is None:
        raise user_error(
            f"checkpoint {path}",
            found="all weights, trained whole" if found is None else "adapters",
            expected="adapters" if found is None else "all weights, trained whole",
            remedy="Resume with the adapter section that it was written with, or start a new run; a full checkpoint's "
            "model can be the model.path of a run with adapters.",
        )
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            raise user_error(
                f"checkpoint {path}: {'digest of the base' if key == BASE else f'adapter.{key}'}",
                found=found.get(key),
                expected=f"{expected.get(key)}, as the {'model of model.path' if key == BASE else 'spec'} has it",
                remedy="Set model.path to the model with which the adapters were trained."
                if key == BASE
                else "Resume with the adapter section that it was written with, or start a new run.",
            )


def _restore(part: Trained, state: dict[str, Any]) -> None:
    result = part.model.load_state_dict(state["model"], strict=False)
    missing = _changed(part, dict.fromkeys(result.missing_keys))
    wrong = [name for name in (*missing, *result.unexpected_keys) if _EXTRA not in name]
    assert not wrong, f"the checkpoint's weights are not the model's: {wrong}"
    if "optimizer" in state:
        part.optimizer.inner.load_state_dict(state["optimizer"])
        part.optimizer.write_weights()
    else:
        part.optimizer.begin_again()
    part.optimizer.schedule.num_steps = 0
    part.optimizer.schedule.load_state_dict(state["schedule"])


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copy the weights in a state to separate CPU memory. The masters and moments in it are copies already."""
    for part in state.values():
        if isinstance(part, dict) and "model" in part:
            _copied(part)
    for tensor in nested_values(state["model"]):
        tensor.data = tensor.data.detach().to("cpu", copy=True)
    return state


def _state(parts: Parts, step: int, extra: Mapping[str, Any], loading: bool) -> dict[str, Any]:
    """Return the state of all models. The policy's is at the top level, every other one under its model's name."""
    state: dict[str, Any] = {"step": step}
    for name, part in parts.items():
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
            "dp_cp_group": part.layout.dp_group,
        }
        weights = _changed(part, part.model.sharded_state_dict(metadata=metadata))
        own: dict[str, Any] = {
            "model": {key: value for key, value in weights.items() if _EXTRA not in key},
            "schedule": part.optimizer.schedule.state_dict(),
        }
        if extra.get(CONTENT) != "weights":
            inner = part.optimizer.inner
            own["optimizer"] = inner.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
        if name:
            add_prefix_for_sharding(own, f"{name}.")
        state |= {name: own} if name else own
    return state


def _changed(part: Trained, state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a model's state that is trained: the adapters, or without adapters everything."""
    if part.adapter is None:
        return state
    trained = {name for name, parameter in part.model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in state.items() if name in trained}
