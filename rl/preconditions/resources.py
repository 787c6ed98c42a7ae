"""What the engines need of this machine: memory for the KV cache and a free port."""

from __future__ import annotations

import errno
import socket

import psutil
import torch

from numerics.errors import user_error
from rl.preconditions.model import ModelShape
from rollout.config import RolloutConfig

BF16_BYTES = 2


def kv_cache_bytes(model: ModelShape, rollout: RolloutConfig) -> int:
    """Bytes of all engines' BF16 key and value caches."""
    return rollout.engines * rollout.max_total_tokens * bytes_per_token(model)


def bytes_per_token(model: ModelShape) -> int:
    """Bytes that one token occupies in one KV cache: a key and a value per layer and key-value head."""
    return 2 * model.layers * model.kv_heads * model.head_dim * BF16_BYTES


def check_kv_cache_memory(model: ModelShape, rollout: RolloutConfig) -> None:
    """Whether the caches fit the memory that is free now. On a GPU the engine itself sizes its cache by the device.

    Raises:
        UserError: they do not.
    """
    if torch.cuda.is_available():
        return
    needed, available = kv_cache_bytes(model, rollout), psutil.virtual_memory().available
    if needed > available:
        most = available // (rollout.engines * bytes_per_token(model))
        raise user_error(
            "rollout.max_total_tokens",
            found=rollout.max_total_tokens,
            expected=f"a KV cache that fits the free memory: {rollout.engines} engine(s) would need "
            f"{needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available",
            remedy=f"Set rollout.max_total_tokens well below {most}, or free memory.",
        )


def check_port(rollout: RolloutConfig) -> None:
    """Whether a port that the spec gives is free, and wanted by one engine only.

    Raises:
        UserError: it is taken, or several engines would share it.
    """
    if rollout.port is None:
        return
    if rollout.engines > 1:
        raise user_error(
            "rollout.port",
            found=rollout.port,
            expected=f"no fixed port for rollout.engines = {rollout.engines}: two engines cannot share one",
            remedy="Remove rollout.port, so that each engine takes a free one.",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Ports in TIME_WAIT are free for a server that sets the same option; listening ones stay refused.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", rollout.port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise user_error(
                "rollout.port",
                found=rollout.port,
                expected="a free port: another server, perhaps another engine, listens on it",
                remedy="Stop that server, choose another port, or remove rollout.port to take a free one.",
            ) from error
