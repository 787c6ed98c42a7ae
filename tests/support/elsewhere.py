"""Scripts whose kernels Triton compiles: whether it interprets or compiles is settled when kernels are defined."""

import importlib
import json
import os
import socket
import sys
import tempfile
from typing import Any

from tests.support.fork_server import send_request, serve, socket_of


def compiled_elsewhere(script: str) -> list[dict[str, Any]]:
    """The kernels that `script` launches inside `compiled_only() as found`, as `Compiled` in plain data."""
    kernels: list[dict[str, Any]] = found_elsewhere(
        script + "\nimport dataclasses, json\nprint(json.dumps([dataclasses.asdict(kernel) for kernel in found]))"
    )
    return kernels


def found_elsewhere(script: str, *arguments: str) -> Any:
    """What `script` prints last, as JSON, in a process whose kernels are not interpreted."""
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
        socket.socket(socket.AF_UNIX) as server,
    ):
        server.connect(socket_of("elsewhere"))
        files = [output.fileno(), errors.fileno()]
        send_request(server, files, env=compiling(), cwd=os.getcwd(), script=script, arguments=arguments)
        with server.makefile() as said:
            _, (_, _, code) = json.loads(said.readline()), json.loads(said.readline())
        for file in (output, errors):
            file.seek(0)
        assert code == 0, errors.read()
        return json.loads(output.read().splitlines()[-1])


def compiling() -> dict[str, str]:
    """This environment, for processes whose kernels are not interpreted."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def _become(asked: dict[str, Any], files: list[int]) -> None:
    """Run a script as `python -c` would."""
    for descriptor, file in enumerate(files, start=1):
        os.dup2(file, descriptor)
    sys.argv = ["-c", *asked["arguments"]]
    exec(compile(asked["script"], "<script>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    for name in ("fp8rl.numerics.kernels.kernels", "tests.support.hopper"):
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])), _become, outlive=False)
