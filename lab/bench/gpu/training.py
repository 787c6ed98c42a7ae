"""The real trainer on a stack of MoE layers: whether a step can be repeated, and how fast the sides are."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.digest import tensor_digests
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer import device
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.distributed.layout import Layout
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch, written
from lab.bench.trainers import random_batch

SPEC = QuantSpec.preset("fp8_block_pow2")
ROUNDS = 7


@torch.enable_grad()
def same_step_twice(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """Two trainers, made anew from the same directory, take the same step of two micro-batches in exact mode."""
    numerics = NumericsConfig(mode="exact", spec=SPEC)
    config = TrainerSection(micro_batch_tokens=sizes.batch * sizes.length // 2, lr=1e-3, warmup_steps=0)
    layout = _start(numerics, config, watch)
    path = written(sizes.stack, watch.device, done.scratch)
    first, second = (_digests(path, config, numerics, layout, sizes) for _ in range(2))
    parallel.shutdown()
    for kind in ("log-probabilities", "gradients", "updated weights"):
        different = sum(first[kind][name] != second[kind][name] for name in first[kind])
        done.row({"of two equal steps": kind, "tensors": len(first[kind]), "that differ": different})
        done.equal(f"{kind} of two equal train steps, tensors that differ", different, tensors=len(first[kind]))
    moved = sum(first["weights"][name] != digest for name, digest in first["updated weights"].items())
    what = {"of two equal steps": "weights that the step changed", "tensors": len(first["weights"])}
    done.row({**what, "that differ": moved})


def _digests(
    path: Path, config: TrainerSection, numerics: NumericsConfig, layout: Layout, sizes: Sizes
) -> dict[str, dict[str, str]]:
    """Digests of everything that a step makes, by kind and name; and of the weights before it."""
    from fp8rl.trainer.trainer import Trainer

    trainer = Trainer(TrainerSpec(path, config, numerics, 0, 100, sizes.length), layout)
    named = dict(trainer.model.named_parameters())

    def digests(of: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[str, str]:
        return dict(zip(named, tensor_digests([of(parameter) for parameter in named.values()]), strict=True))

    found = {"weights": digests(torch.Tensor.detach)}
    batch = random_batch(sizes.batch, sizes.length, sizes.stack.vocab)
    passed = trainer.forward_backward(batch, SftObjective.of(batch))
    found["log-probabilities"] = {"all": tensor_digests([passed.result.logprobs])[0]}
    found["gradients"] = digests(lambda parameter: parameter.main_grad)  # type: ignore[attr-defined]
    trainer.update()
    found["updated weights"] = digests(torch.Tensor.detach)
    del trainer
    _free()
    return found


def rates(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """Tokens per second of forward and backward: exact FP8 first, then FP8 and BF16 of the libraries."""
    sides = {
        "FP8 exact": NumericsConfig(mode="exact", spec=SPEC),
        "FP8 native": NumericsConfig(mode="native", spec=SPEC),
        "BF16 native": NumericsConfig(mode="native", spec=SPEC, trainer="bf16"),
    }
    config = TrainerSection(micro_batch_tokens=sizes.batch * sizes.length)
    layout = _start(sides["FP8 exact"], config, watch)
    if watch.device.type == "cuda" and not device.has_transformer_engine():
        # Megatron's own attention would keep all scores of 4,096 tokens, which no user's run does.
        done.leave_out("native training", "not installed: transformer_engine")
        del sides["BF16 native"], sides["FP8 native"]
    path, tokens = written(sizes.stack, watch.device, done.scratch), sizes.batch * sizes.length

    def rate(name: str, numerics: NumericsConfig) -> float:
        _free()  # one side after the other: three optimizers do not fit
        seconds = _step_seconds(path, config, numerics, layout, sizes, watch)
        done.row({"side": name}, {"tokens/s": tokens / seconds["forward and backward"], **seconds})
        return tokens / seconds["forward and backward"]

    found = done.each_side(sides, rate)
    parallel.shutdown()
    bars = (("FP8 native", "BF16 native", 1.3), ("FP8 exact", "BF16 native", 1.1), ("FP8 exact", "FP8 native", 0.75))
    done.ratios(f"train ({tokens:,} tokens)", "tokens/s", found, bars)


@torch.enable_grad()
def _step_seconds(
    path: Path, config: TrainerSection, numerics: NumericsConfig, layout: Layout, sizes: Sizes, watch: Stopwatch
) -> dict[str, float]:
    from fp8rl.trainer.trainer import Trainer

    trainer = Trainer(TrainerSpec(path, config, numerics, 0, 100, sizes.length), layout)
    batch = random_batch(sizes.batch, sizes.length, sizes.stack.vocab)
    objective = SftObjective.of(batch)
    step = watch.seconds(lambda: trainer.train_step(batch, objective), repeats=ROUNDS, with_host=True)
    rounds = ROUNDS if watch.device.type == "cuda" else 1
    passes = [trainer.forward_backward(batch, objective).result.seconds for _ in range(rounds)]
    return {"forward and backward": statistics.median(passes), "step": step}


def _start(numerics: NumericsConfig, config: TrainerSection, watch: Stopwatch) -> Layout:
    """This process as the one rank of a trainer; a rehearsal keeps its interpreted kernels."""
    if watch.device.type == "cuda":
        parallel.start(0, numerics)
    return parallel.initialize(config)


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
