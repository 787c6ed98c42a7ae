"""Ray's workers that are forked from one process that has imported the trainer: the imports are most of their start.

Ray executes `setup_worker.py` for each. In tests Python has a fork do that instead, before it has imported anything.
"""

import os
import sys

WORKERS = "FP8RL_TEST_WORKERS"
"""Names the socket of the process that forks them to every process of a test session."""
MARK = "FP8RL_TEST_FAMILY"
"""In the environment of a run whose processes are found by it. A fork would not be: it has the environment of the
process that it comes from, as the kernel shows it."""
_ALIKE = ("TORCHDYNAMO_DISABLE", "TRITON_INTERPRET")
"""Settings that are read by imports: a process that has others than tests do imports for itself."""


def take_over() -> None:
    """Where this process is to become a worker of Ray's: have a fork do so, and end as it does; killed, end it."""
    scripts = [index for index, each in enumerate(sys.orig_argv) if each.endswith("/setup_worker.py")]
    path = os.environ.get(WORKERS)
    if not scripts or path is None or MARK in os.environ or any(os.environ.get(name) != "1" for name in _ALIKE):
        return
    import json
    import socket

    from tests.support.fork_server import send_request

    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        send_request(
            server, [0, 1, 2], env=dict(os.environ), cwd=os.getcwd(), arguments=sys.orig_argv[scripts[0] + 1 :]
        )
        with server.makefile() as said:
            *_, (_, _, status) = map(json.loads, said)
    os._exit(status if status >= 0 else 1)
