"""A process that has made its imports and forks others, for which they would be most of a start.

Whoever wants a process connects to its socket, sends environment, arguments and open files, and hears of the process's
start and end.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

_WAIT = """import runpy, select, sys
module, sys.argv = sys.argv[1], sys.argv[1:]
if 0 not in select.select([0, int(sys.argv[1])], [], [])[0]:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class ForkServer:
    """The server of `tests.support.NAME` as its owner has it: it gets the listening socket's descriptor as its argument
    and hands it to `serve`. It makes its imports when it is first asked for a process, and ends with its owner."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(socket_of(name))
            listener.listen(64)
            fd = listener.fileno()
            command = [sys.executable, "-P", "-c", _WAIT, f"tests.support.{name}", str(fd)]
            self._process = subprocess.Popen(command, env=dict(environment), stdin=subprocess.PIPE, pass_fds=[fd])
        atexit.register(self._close)

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def socket_of(name: str) -> str:
    """Where the workers of a test session find its server."""
    return str(Path(os.environ["FP8RL_TESTS_PATH"], name))


def serve(listener: socket.socket, become: Callable[[dict[str, Any], list[int]], object], *, outlive: bool) -> None:
    """Fork for each request, until standard input ends.

    become: what the fork does, of what was asked for and the files that came with it. outlive: a fork goes on where the
    process that asked for it has ended; it is killed otherwise.
    """
    from setproctitle import getproctitle  # a lent machine's image lacks it, and forks nothing

    getproctitle()  # which finds its room in memory beside the first environment: forks get another one
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
            asked, fds = _request(client)
            if asked is None:
                clients.remove(client)
                client.close()
                for pid in [pid for pid, owner in owners.items() if owner is client and not outlive]:
                    os.kill(pid, signal.SIGKILL)
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (wake, woken):
                    os.close(descriptor)
                for each in (listener, *clients):
                    each.close()
                os._exit(exit_code_of(partial(become, asked, fds), asked["env"], asked["cwd"]))
            for descriptor in fds:
                os.close(descriptor)
            owners[pid] = client
            _say(client, "forked", pid, 0)


def send_request(server: socket.socket, fds: list[int], **asked: Any) -> None:
    """Ask for a process with these files, and this environment and directory."""
    text = json.dumps(asked).encode()
    socket.send_fds(server, [len(text).to_bytes(4, "big")], fds)
    server.sendall(text)


def _request(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """What a client asks for, and the files that came with it; None: it has ended."""
    try:
        header, fds, _, _ = socket.recv_fds(client, 4, 8)
        length = int.from_bytes(header, "big")
        return (json.loads(client.recv(length, socket.MSG_WAITALL)) if header else None), fds
    except ConnectionError:
        return None, []


def _report_ended(owners: dict[int, socket.socket]) -> None:
    while owners:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _say(owners.pop(pid), "ended", pid, os.waitstatus_to_exitcode(status))


def _say(client: socket.socket, event: str, pid: int, status: int) -> None:
    with suppress(OSError):  # it has ended itself
        client.sendall(json.dumps([event, pid, status]).encode() + b"\n")


def exit_code_of(main: Callable[[], object], environment: Mapping[str, str], folder: str) -> int:
    """Run what a fork is for, in an environment and a directory of its own, and return its exit code."""
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        tempfile.tempdir = None
        main()
        return 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
