"""Parts of the GPU bench that go wrong after their first row."""

import os
import subprocess
import time
from typing import Any

from lab.bench.gpu.measure import Measured
from lab.bench.gpu.parts import Part


def raises(done: Measured, *_: Any) -> None:
    done.row({"here": 1}, {"seconds": 2.0})
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand what else it says")


def dies(done: Measured, *_: Any) -> None:
    done.row({"here": 1})
    os._exit(9)


def hangs(done: Measured, *_: Any) -> None:
    """With a process that its parent has left behind, in a session of its own."""
    shell = subprocess.Popen(
        ["setsid", "sh", "-c", "sleep 1000 & echo $!"], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    assert shell.stdout is not None
    done.row({"sleeps": int(shell.stdout.readline())})
    time.sleep(1000)


def part(name: str) -> Part:
    return Part(name, f"{name}.", f"tests.support.gpu_parts:{name}", kernels=False)
