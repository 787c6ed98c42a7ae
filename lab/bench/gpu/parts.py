"""The parts of the GPU bench, in the order in which they tell most for the time that they take."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pkgutil
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.probe import choose_tiles
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch
from lab.bench.runner import Job

REHEARSED_SLOWER = 10
"""How many times its limit a part may take on a CPU."""
VERSIONS = ("torch", "triton", "megatron-core", "transformer_engine", "sglang", "sgl-deep-gemm", "transformers", "ray")
_TRAINER = ("pydantic", "einops", "megatron", "safetensors", "tokenizers", "transformers")
_ENGINE = ("sglang", "ray", "httpx", "aiohttp")


@dataclass(frozen=True)
class Part:
    """One part, which has a process of its own."""

    name: str
    shows: str
    """One line for the page."""
    run: str
    """`module:function` of what it fills, the sizes and a stopwatch."""
    limit_s: int = 90
    needs: tuple[str, ...] = ()
    """Packages that it imports beside torch and Triton."""
    kernels: bool = True
    """Its ops run on the kernels, interpreted in a rehearsal; with an engine, on what trainer and engine choose."""

    def job(self, rehearse: bool, scratch: str) -> Job:
        """The part as a job; scratch: a folder that the parts of one call share."""
        arguments = {"part": asdict(self), "rehearse": rehearse, "scratch": scratch}
        # Read before anything imports Triton; a GPU is left alone.
        environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if rehearse else {}
        limit_s = self.limit_s * (REHEARSED_SLOWER if rehearse else 1)
        return Job(self.name, "lab.bench.gpu.parts:measure", arguments, limit_s, environment)


def measure(say: Callable[[dict[str, Any]], object], part: dict[str, Any], rehearse: bool, scratch: str) -> None:
    """Run a part in this process. A rehearsal says no times."""
    own = Part(**part)
    say({"begin": machine(rehearse), "shows": own.shows})
    done = Measured(Path(scratch), say, timed=not rehearse)
    missing = [name for name in own.needs if importlib.util.find_spec(name) is None]
    if missing:
        done.leave_out(own.name, f"not installed: {', '.join(missing)}")
        return
    with ExitStack() as stack:
        if own.kernels:
            stack.enter_context(using("triton"))
            stack.enter_context(torch.no_grad())
            if not rehearse:
                choose_tiles("cuda")  # as trainer and engine do when they start
        run = pkgutil.resolve_name(own.run)
        run(done, Sizes.tiny() if rehearse else Sizes.real(), Stopwatch("cpu" if rehearse else "cuda"))


def machine(rehearsal: bool) -> dict[str, Any]:
    """Describe this machine and its software."""
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


PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part(
            "exactness",
            "The start-up probe; trainer's forms of all ops against the engine's, bit for bit",
            "lab.bench.gpu.exactness:run",
            limit_s=120,
        ),
        Part(
            "graph",
            "A decode step in a CUDA graph against the same step without, bit for bit, also after a weight update",
            "lab.bench.gpu.graph:run",
        ),
        Part(
            "vocabulary",
            "Draw, log-probabilities and paged attention at a real vocabulary: their definitions, then their rates",
            "lab.bench.gpu.vocabulary:run",
        ),
        Part(
            "trees",
            "Attention over answers to one prompt, as a prefix tree against packed rows: equal bits, then both times",
            "lab.bench.gpu.trees:run",
            limit_s=40,
            needs=_TRAINER,
        ),
        Part(
            "deepgemm",
            "DeepGEMM's products against ours: the same bits, then both rates",
            "lab.bench.gpu.products:deepgemm",
            limit_s=60,
        ),
        Part(
            "bits",
            "The numbers of torch._scaled_mm and DeepGEMM against ours, for every number of rows that a run multiplies",
            "lab.bench.gpu.bits:run",
            limit_s=60,
        ),
        Part(
            "launch",
            "Time of the host for a launch from Python, and of a GPU for a kernel of a CUDA graph beside its bytes",
            "lab.bench.gpu.launch:run",
            limit_s=30,
        ),
        Part("quantizers", "Quantizers against a plain copy", "lab.bench.gpu.products:quantizers", limit_s=60),
        Part("gemms", "Dense products of the forward against cuBLAS", "lab.bench.gpu.products:gemms"),
        Part("grouped", "Products of experts, forward and weight gradient", "lab.bench.gpu.products:grouped"),
        Part(
            "candidates",
            "Products of specialised warps, and torch's of gradients, against ours: equal bits, then all rates",
            "lab.bench.gpu.products:candidates",
            limit_s=60,
        ),
        Part(
            "sync",
            "The passes of a weight sync against a plain copy",
            "lab.bench.gpu.sync:passes",
            limit_s=60,
            needs=("pydantic", "safetensors"),
        ),
        Part(
            "transport",
            "Weights from one process to another by the transport `tensor`, digested at both ends",
            "lab.bench.gpu.sync:transport",
            limit_s=60,
            needs=(*_TRAINER, *_ENGINE),
        ),
        Part(
            "steps",
            "Two equal train steps from the same weights: gradients and updated weights, bit for bit",
            "lab.bench.gpu.training:same_step_twice",
            limit_s=150,
            needs=_TRAINER,
        ),
        Part(
            "stack",
            "Train steps of four layers in BF16, native FP8 and exact FP8",
            "lab.bench.gpu.training:rates",
            limit_s=120,
            needs=_TRAINER,
        ),
        Part(
            "engine",
            "The real engine beside the real trainer, two layers of Qwen3-30B-A3B: d == 0 through two updates",
            "lab.bench.gpu.engine:agreement",
            limit_s=270,
            needs=(*_TRAINER, *_ENGINE),
            kernels=False,
        ),
        Part(
            "rollout",
            "Tokens per second of the engine on the same model in BF16, native FP8 and exact FP8",
            "lab.bench.gpu.engine:rates",
            limit_s=250,
            needs=(*_TRAINER, *_ENGINE),
            kernels=False,
        ),
        Part(
            "demo",
            "`fp8rl demo`, shortened",
            "lab.bench.gpu.engine:demo",
            limit_s=160,
            needs=(*_TRAINER, *_ENGINE, "typer", "wandb"),
            kernels=False,
        ),
    )
}
WITHOUT_ENGINE = ("exactness", "quantizers", "gemms", "grouped", "sync", "stack")
