"""Checkpoints that are whole or absent, and that load on any parallel layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel

from numerics.errors import user_error
from numerics.files import publish_directory
from trainer import checkpoint_writer
from trainer.optimizer import Optimizer

FORMAT = 1
_STATE = "state"
_ABOUT = "about.json"
_EXTRA = "_extra_state"
"""In the names of what TransformerEngine's modules keep for other recipes than block scaling, which has no history."""


def save(path: Path, model: GPTModel, optimizer: Optimizer, step: int, extra: dict[str, Any]) -> None:
    """Write weights, FP32 masters, moments, schedule, step and `extra` (JSON values) to the directory `path`.

    All ranks take part. The directory appears complete under its name, or not at all; one that is there is replaced.
    """
    path = Path(path).absolute()
    partial = path.with_name(f".{path.name}.partial")
    about = json.dumps({"format": FORMAT, "step": step, "extra": extra}, allow_nan=False)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / _STATE).mkdir(parents=True)
        (partial / _ABOUT).write_text(about)
    dist.barrier()
    checkpoint_writer.install()
    dist_checkpointing.save(_state(model, optimizer, step, loading=False), str(partial / _STATE))
    dist.barrier()
    if dist.get_rank() == 0:
        publish_directory(partial, path)
    dist.barrier()


def load(path: Path, model: GPTModel, optimizer: Optimizer) -> tuple[int, dict[str, Any]]:
    """Restore what :func:`save` wrote, on this layout. All ranks take part.

    Returns:
        The step, and the `extra` given to `save`.

    Raises:
        UserError: no checkpoint there, or one of another format.
    """
    path = Path(path).absolute()
    about = read_about(path)
    state = dist_checkpointing.load(_state(model, optimizer, about["step"], loading=True), str(path / _STATE))
    _load_weights(model, state["model"])
    optimizer.inner.load_state_dict(state["optimizer"])
    optimizer.write_weights()
    optimizer.schedule.num_steps = 0
    optimizer.schedule.load_state_dict(state["schedule"])
    return about["step"], about["extra"]


def read_about(path: Path) -> dict[str, Any]:
    """The `step` and `extra` of the checkpoint at `path`, without its tensors."""
    file = Path(path) / _ABOUT
    if not file.is_file():
        raise user_error(
            "checkpoint",
            found=str(path),
            expected=f"a checkpoint directory with {_ABOUT}",
            remedy="Name one of the run's checkpoints/step_N directories.",
        )
    about = json.loads(file.read_text())
    if about.get("format") != FORMAT:
        raise user_error(
            f"{file}: format",
            found=about.get("format"),
            expected=str(FORMAT),
            remedy="Load it with the version of fp8rl that wrote it.",
        )
    return about


def _load_weights(model: GPTModel, weights: dict[str, Any]) -> None:
    result = model.load_state_dict(weights, strict=False)
    wrong = [name for name in (*result.missing_keys, *result.unexpected_keys) if _EXTRA not in name]
    assert not wrong, f"the checkpoint's weights are not the model's: {wrong}"


def _state(model: GPTModel, optimizer: Optimizer, step: int, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = model.sharded_state_dict(metadata=metadata)
    return {
        "model": {name: value for name, value in weights.items() if _EXTRA not in name},
        "optimizer": optimizer.inner.sharded_state_dict(weights, is_loading=loading, metadata=metadata),
        "schedule": optimizer.schedule.state_dict(),
        "step": step,
    }
