"""The Ray cluster of a run: the one that RAY_ADDRESS names, or a private one that ends with the run."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]


@contextmanager
def ray_cluster(failure_logs: Path) -> Iterator[None]:
    """Join the cluster of RAY_ADDRESS (`ray job submit` sets it), else start one that nobody else uses.

    A cluster that merely happens to run on this machine is never joined, so that two runs stay apart. A private one has
    its own folder; its logs are kept in `failure_logs` only if the block fails. Ray listens on every interface and lets
    in whoever has its token, which this process and those that it starts have in their environment.
    """
    # Ray would otherwise hide the GPUs from an actor that asks for none, and warn about it for each.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's own niceness, 15, would have the trainer wait for whatever else runs on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    address = os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        yield
    elif address:
        try:
            _init(address=address)
            yield
        finally:
            ray.shutdown()
    else:
        with _private_cluster(failure_logs):
            yield


@contextmanager
def _private_cluster(failure_logs: Path) -> Iterator[None]:
    # Left to itself, Ray writes a token into the user's home, and any cluster started later asks for it.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    AuthenticationTokenLoader.instance().reset_cache()  # which holds another one if this process has used Ray before
    folder = Path(tempfile.mkdtemp(prefix="fp8rl-ray-", dir="/tmp"))  # paths of sockets must stay short
    try:
        _init(address="local", include_dashboard=False, _temp_dir=str(folder))
        yield
    except Exception:
        ray.shutdown(wait_for_processes=True)
        logs = folder / "session_latest" / "logs"
        if logs.is_dir():
            shutil.copytree(logs, failure_logs, dirs_exist_ok=True)
        raise
    finally:
        ray.shutdown(wait_for_processes=True)
        shutil.rmtree(folder, ignore_errors=True)


def _init(**options: Any) -> None:
    """`ray.init`, which puts a handler of SIGTERM that exits in place of ours: undo that."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, handler)
