"""The process of one part: `python -m lab.bench.gpu.child JSON`, started by `processes`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import pkgutil
import platform
import sys
import traceback
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.backend.probe import choose_tiles
from lab.bench.gpu.journal import Journal
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch
from lab.bench.gpu.parts import Part

VERSIONS = ("torch", "triton", "megatron-core", "transformer_engine", "sglang", "sgl-deep-gemm", "transformers", "ray")


def main() -> int:
    asked = json.loads(sys.argv[1])
    part = Part(**asked["part"])
    journal = Journal(Path(asked["journal"]), part.name)
    torch.set_num_threads(1)
    try:
        measure(part, asked["rehearse"], journal, Path(asked["scratch"]))
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        journal.say({"failed": f"{type(error).__name__}: {first}"})
        return 1
    return 0


def measure(part: Part, rehearse: bool, journal: Journal, scratch: Path) -> None:
    """Run a part in this process. A rehearsal is told without its times. scratch: shared by the parts of a call."""
    journal.say({"begin": machine(rehearse), "shows": part.shows})
    done = Measured(scratch, journal.say, timed=not rehearse)
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        done.leave_out(part.name, f"not installed: {', '.join(missing)}")
        return
    with ExitStack() as stack:
        if part.kernels:
            stack.enter_context(using("triton"))
            stack.enter_context(torch.no_grad())
            if not rehearse:
                choose_tiles("cuda")  # as trainer and engine do when they start
        run = pkgutil.resolve_name(part.run)
        run(done, Sizes.tiny() if rehearse else Sizes.real(), Stopwatch("cpu" if rehearse else "cuda"))


def machine(rehearsal: bool) -> dict[str, Any]:
    """What measures."""
    found = {"python": platform.python_version(), **{name: _version(name) for name in VERSIONS}}
    described: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "versions": found}
    if rehearsal:
        return described | {"device": "none: a rehearsal on the CPU"}
    properties = torch.cuda.get_device_properties(0)
    return described | {
        "device": properties.name,
        "memory_gib": properties.total_memory >> 30,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
