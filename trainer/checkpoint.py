"""Checkpoints that are whole or absent, and that load on any parallel layout."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from numerics.files import publish_directory
from trainer import checkpoint_writer
from trainer.checkpoint_files import (
    STATE,
    About,
    DamagedCheckpointError,
    check_digests,
    digests,
    read_about,
    write_about,
)
from trainer.optimizer import Optimizer

_EXTRA = "_extra_state"
"""In the names of what TransformerEngine's modules keep for other recipes than block scaling, which has no history."""


def save(
    path: Path, model: GPTModel, optimizer: Optimizer, step: int, extra: dict[str, Any], texts: Mapping[str, str]
) -> None:
    """Write weights, FP32 masters, moments, schedule, step, `extra` (JSON values) and `texts` (further files, by name)
    to the directory `path`.

    All ranks take part. The directory appears complete under its name, or not at all; one that is there is replaced.
    """
    path = Path(path).absolute()
    partial = path.with_name(f".{path.name}.partial")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / STATE).mkdir(parents=True)
        for name, text in texts.items():
            (partial / name).write_text(text)
    dist.barrier()
    checkpoint_writer.install()
    try:
        dist_checkpointing.save(_state(model, optimizer, step, loading=False), str(partial / STATE))
    except CheckpointException as error:
        free = shutil.disk_usage(partial).free
        shutil.rmtree(partial, ignore_errors=True)  # which may be all the room there is
        cause = next(iter(error.failures.values()))[0]
        raise OSError(
            f"checkpoint {path}: found {str(cause).splitlines()[0]!r} while its tensors were written, with "
            f"{free >> 20} MiB free on the disk, expected room for them. Free some, or set run.dir to another disk"
        ) from error
    dist.barrier()
    files = sorted(str(file.relative_to(partial)) for file in partial.rglob("*") if file.is_file())
    written = _all_gathered(digests(partial, files[rank :: dist.get_world_size()]))
    if rank == 0:
        write_about(partial, About(step, extra, {name: held for part in written for name, held in part.items()}))
        publish_directory(partial, path)
    dist.barrier()


def load(path: Path, model: GPTModel, optimizer: Optimizer) -> tuple[int, dict[str, Any]]:
    """Restore what :func:`save` wrote, on this layout. All ranks take part.

    Returns:
        The step, and the `extra` given to `save`.

    Raises:
        UserError: no checkpoint there, or one of another format.
        DamagedCheckpointError: a file is not the one that was written; nothing was loaded.
    """
    path = Path(path).absolute()
    about = read_about(path)
    _check_files(path, sorted(about.files))
    state = dist_checkpointing.load(_state(model, optimizer, about.step, loading=True), str(path / STATE))
    _load_weights(model, state["model"])
    optimizer.inner.load_state_dict(state["optimizer"])
    optimizer.write_weights()
    optimizer.schedule.num_steps = 0
    optimizer.schedule.load_state_dict(state["schedule"])
    return about.step, about.extra


def _check_files(path: Path, names: list[str]) -> None:
    """Each rank reads its share, and all raise what one has found."""
    try:
        check_digests(path, names[dist.get_rank() :: dist.get_world_size()])
        problem = None
    except DamagedCheckpointError as error:
        problem = str(error)
    for found in _all_gathered(problem):
        if found is not None:
            raise DamagedCheckpointError(found)


def _all_gathered(value: Any) -> list[Any]:
    """Every rank's."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
