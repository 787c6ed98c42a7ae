"""The process that has imported the trainer and forks Ray's workers: what `warm_worker` asks for.

It has not imported Ray, which reads its environment once, when it is loaded. That this machine's arithmetic is
row-invariant is known to the forks: each trainer would find it out anew.
"""

import argparse
import importlib
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support import fork_server


def _serve(listener: socket.socket) -> None:
    for name in (
        "tests.support.trainer_imports",
        "fp8rl.rl.experiment.preconditions.rules",
        "fp8rl.rollout.engine.server.arguments",
        "fp8rl.rollout.engine.server.client",
        "fp8rl.rollout.engine.server.processes",
        *("requests", "jsonschema", "msgpack", "uvloop"),  # most of what Ray imports
    ):
        importlib.import_module(name)
    assert "ray" not in sys.modules
    from fp8rl.trainer import trainer

    variant = trainer.row_variant_ops(torch.device("cpu"))
    trainer.row_variant_ops = lambda device, kv: variant  # type: ignore[assignment]
    fork_server.serve(listener, _become, outlive=False)


def _become(asked: dict[str, Any], fds: list[int]) -> None:
    """The worker, as Ray's `setup_worker.py` would execute it."""
    for descriptor, given in enumerate(fds):
        os.dup2(given, descriptor)
        os.close(given)
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    setup, worker = parser.parse_known_args(asked["arguments"])
    from ray._private.runtime_env.context import RuntimeEnvContext

    os.environ.update(RuntimeEnvContext.deserialize(setup.serialized_runtime_env_context).env_vars)
    sys.argv = worker
    sys.path[0] = str(Path(worker[0]).parent)
    runpy.run_path(worker[0], run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
