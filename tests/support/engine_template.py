"""The process that has imported SGLang and forks engines: what `warm_engine` asks for.

What an engine makes of its environment and its arguments comes after the imports, and is the launcher's own code.
"""

import importlib
import os
import socket
import sys
from typing import Any

import torch

from fp8rl.numerics.probe import row_variant_ops
from tests.support import fork_server


def _serve(listener: socket.socket) -> None:
    sys.modules["megatron"] = None  # type: ignore[assignment]  # as the launcher has it
    for name in (
        "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler",
        "sglang.srt.model_executor.model_runner", "fp8rl.rollout.engine.server.launcher",
    ):  # fmt: skip
        importlib.import_module(name)
    variant = row_variant_ops(torch.device("cpu"))  # of this machine, as every engine would find out anew

    def become(asked: dict[str, Any], fds: list[int]) -> None:
        """The engine: a session and a standard input of its own."""
        os.setsid()
        reading, log, *kept = fds
        os.dup2(reading, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for descriptor in (reading, log):
            os.close(descriptor)
        for descriptor in kept:
            os.set_inheritable(descriptor, True)
        sys.argv = ["launcher"]
        from fp8rl.rollout.engine.plugin import state
        from fp8rl.rollout.engine.server import launcher
        from tests.support import plants

        state.row_variant_ops = lambda device, kv: variant  # type: ignore[assignment]
        if planted := os.environ.get(plants.PLANT):
            getattr(plants, planted)()
        launcher.main()

    fork_server.serve(listener, become, outlive=True)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
