"""The parts of the GPU bench, in the order in which they tell most for the time that they take."""

from __future__ import annotations

from dataclasses import dataclass

_TRAINER = ("pydantic", "einops", "megatron", "mbridge", "safetensors", "tokenizers", "transformers")
_ENGINE = ("sglang", "ray", "httpx", "aiohttp")


@dataclass(frozen=True)
class Part:
    """One part: `run` takes what it fills, the sizes and a stopwatch, in a process of its own.

    run: as module:function. shows: one line for the page. limit_s: after which the process is ended, with all that it
    has started; ten times that in a rehearsal. needs: packages that it imports beside torch and Triton. kernels: its
    ops run on the kernels, interpreted in a rehearsal; a part with an engine runs what trainer and engine choose.
    """

    name: str
    shows: str
    run: str
    limit_s: int = 90
    needs: tuple[str, ...] = ()
    kernels: bool = True


PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part(
            "exactness",
            "The start-up probe; trainer's forms of all ops against the engine's, bit for bit",
            "lab.bench.gpu.exactness:run",
            limit_s=150,
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
            "deepgemm",
            "DeepGEMM's products against ours: the same bits, then both rates",
            "lab.bench.gpu.deepgemm:run",
            limit_s=120,
        ),
        Part("quantizers", "Quantizers against a plain copy", "lab.bench.gpu.products:quantizers", limit_s=60),
        Part("gemms", "Dense products of the forward against cuBLAS", "lab.bench.gpu.products:gemms"),
        Part("grouped", "Products of experts, forward and weight gradient", "lab.bench.gpu.products:grouped"),
        Part(
            "sync",
            "The passes of a weight sync against a plain copy",
            "lab.bench.gpu.sync:run",
            limit_s=60,
            needs=("pydantic", "safetensors"),
        ),
        Part(
            "transport",
            "Weights from one process to another by the transport `tensor`, digested at both ends",
            "lab.bench.gpu.transport:run",
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
            "The real engine beside the real trainer, four layers of Qwen3-30B-A3B: d == 0 through two updates",
            "lab.bench.gpu.engine:agreement",
            limit_s=270,
            needs=(*_TRAINER, *_ENGINE),
            kernels=False,
        ),
        Part(
            "rollout",
            "Tokens per second of the engine on the same model in BF16, native FP8 and exact FP8",
            "lab.bench.gpu.engine:rates",
            limit_s=270,
            needs=(*_TRAINER, *_ENGINE),
            kernels=False,
        ),
        Part(
            "demo",
            "`fp8rl demo`, shortened",
            "lab.bench.gpu.demo:run",
            limit_s=180,
            needs=(*_TRAINER, *_ENGINE, "typer", "wandb"),
            kernels=False,
        ),
    )
}
WITHOUT_ENGINE = ("exactness", "quantizers", "gemms", "grouped", "sync", "stack")
