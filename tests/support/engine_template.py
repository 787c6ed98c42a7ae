"""The process that has imported SGLang and forks engines: what `warm_engine` asks for.

What an engine makes of its environment and its arguments comes after the imports, and is the launcher's own code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from typing import Any

import torch
from setproctitle import getproctitle

from fp8rl.numerics.backend.probe import row_variant_ops


def _serve(listener: socket.socket) -> None:
    """Fork an engine for each request, and tell whoever asked for it of its end, until standard input ends."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # as the launcher has it
    for name in (
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.model_executor.model_runner",
        "fp8rl.rollout.server.launcher",
    ):
        importlib.import_module(name)
    getproctitle()  # which finds its room in memory beside the first environment: engines get another one
    variant = row_variant_ops(torch.device("cpu"))  # of this machine, as every engine would find out anew
    gc.collect()
    gc.freeze()  # or each fork walks through all that the imports have made
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: set[socket.socket] = set()
    owners: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, wake, listener, *clients], [], [])
        if 0 in ready:
            return
        if wake in ready:
            os.read(wake, 100)
            _report_ended(owners)
        if listener in ready:
            clients.add(listener.accept()[0])
        for client in clients.intersection(ready):
            header, fds, _, _ = socket.recv_fds(client, 4, 8)
            if not header:
                clients.remove(client)
                client.close()
                continue
            asked = json.loads(client.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (wake, woken):
                    os.close(descriptor)
                for each in (listener, *clients):
                    each.close()
                _become(asked, fds, variant)
            for descriptor in fds:
                os.close(descriptor)
            owners[pid] = client
            _say(client, "forked", pid, 0)


def _report_ended(owners: dict[int, socket.socket]) -> None:
    while owners:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _say(owners.pop(pid), "ended", pid, os.waitstatus_to_exitcode(status))


def _say(client: socket.socket, event: str, pid: int, status: int) -> None:
    with suppress(OSError):  # it has ended itself
        client.sendall(json.dumps([event, pid, status]).encode() + b"\n")


def _become(asked: dict[str, Any], fds: list[int], variant: list[str]) -> None:
    """The engine: a session, an environment and a standard input of its own. variant: the ops that vary by row here."""
    code = 1
    try:
        os.setsid()
        reading, log, *kept = fds
        os.dup2(reading, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for descriptor in (reading, log):
            os.close(descriptor)
        for descriptor in kept:
            os.set_inheritable(descriptor, True)
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        tempfile.tempdir = None
        sys.argv = ["launcher"]
        from fp8rl.rollout.plugin import state
        from fp8rl.rollout.server import launcher
        from tests.support import plants

        state.row_variant_ops = lambda device, kv: variant  # type: ignore[assignment]
        if planted := os.environ.get(plants.PLANT):
            getattr(plants, planted)()
        launcher.main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
