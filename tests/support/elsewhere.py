"""Scripts whose kernels Triton compiles: whether it interprets or compiles is settled when kernels are defined.

A process that has imported torch, Triton and the kernels forks for each script: the imports are most of a script.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from tests.support.fork_server import exit_code_of


def compiled_elsewhere(script: str) -> list[dict[str, Any]]:
    """The kernels that `script` launches inside `compiled_only() as found`, as `Compiled` in plain data."""
    kernels: list[dict[str, Any]] = found_elsewhere(
        script + "\nimport dataclasses, json\nprint(json.dumps([dataclasses.asdict(kernel) for kernel in found]))"
    )
    return kernels


def found_elsewhere(script: str, *arguments: str) -> Any:
    """What `script` prints last, as JSON, in a process whose kernels are not interpreted."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        asked = {
            "script": script,
            "arguments": arguments,
            "environment": compiling(),
            "folder": os.getcwd(),
            "output": [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (output, errors)],
        }
        template = _template()
        assert template.stdin is not None and template.stdout is not None
        template.stdin.write(json.dumps(asked) + "\n")
        template.stdin.flush()
        code = template.stdout.readline()
        output.seek(0)
        errors.seek(0)
        assert code == "0\n", errors.read()
        return json.loads(output.read().splitlines()[-1])


def compiling() -> dict[str, str]:
    """This environment, for processes whose kernels are not interpreted."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@functools.cache
def _template() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.support import elsewhere; elsewhere._serve()"],
        env=compiling(),
        stdin=pipe,
        stdout=pipe,
        text=True,
    )
    atexit.register(process.communicate)  # at the end of its input it ends
    return process


def _serve() -> None:
    """Fork for each line of standard input, and say with which code it ended."""
    for name in ("fp8rl.numerics.kernels.kernels", "tests.support.hopper"):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            os._exit(_ran(**json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _ran(script: str, arguments: list[str], environment: dict[str, str], folder: str, output: list[str]) -> int:
    """Run a script as `python -c` would; its exit code."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in enumerate(output, start=1):
        os.dup2(os.open(path, os.O_WRONLY), descriptor)
    sys.argv = ["-c", *arguments]

    def run() -> None:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})

    return exit_code_of(run, environment, folder)
