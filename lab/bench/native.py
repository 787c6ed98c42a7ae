"""Distance of native mode's logprobs from exact ones, beside what FP8 itself changes in them: a trainer, no engine.

The exact trainer stands for the engine, whose exact logprobs it has bit for bit. The examples' trained models read what
their warm start imitates; random models, with weights so large that rounding shows everywhere, read random tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.config import Mode, TrainerPrecision
from fp8rl.rollout.tasks.data import Source, load_problems
from fp8rl.rollout.types import prompt_ids
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.step.batch import TokenBatch
from lab.bench.measure import Result
from lab.bench.trainers import numerics_of, random_batch
from tests.support.rig import write_random
from tests.support.tiny_model import TinyModel

EXAMPLES = ("tiny_qwen3_moe", "tiny_qwen2", "tiny_olmoe", "tiny_glm", "tiny_deepseek")
WIDER = TinyModel(layers=4, hidden=256, heads=4, kv_heads=2, intermediate=256, experts=8, top_k=4, family="glm4_moe")
RANDOM = {
    "moe": replace(WIDER, layers=3, intermediate=128, renormalize=False, family="qwen3"),
    "glm": WIDER,
    "deepseek": replace(WIDER, kv_heads=1, yarn=True, family="deepseek_v3"),
    "flash": replace(WIDER, kv_heads=1, groups=1, family="glm4_moe_lite"),
}
ROWS, WIDTH = 6, 128


def run() -> Iterator[Result]:
    enable_compiler()
    layout = parallel.initialize(TrainerSection())
    with tempfile.TemporaryDirectory() as folder:
        for name in EXAMPLES:
            yield _result(Path("examples/models") / name, name, _taught(), layout)
        for name, shape in RANDOM.items():
            model = write_random(Path(folder) / name, shape)
            yield _result(model, f"random {name}", random_batch(ROWS, WIDTH, shape.vocab), layout)
    parallel.shutdown()


def _result(model: Path, name: str, batch: TokenBatch, layout: Any) -> Result:
    from fp8rl.trainer.scorer import Scorer

    def logprobs(mode: Mode, precision: TrainerPrecision, change: Callable[[Any], None] | None = None) -> Tensor:
        numerics = numerics_of(precision, mode)
        scorer = Scorer(TrainerSpec(model, TrainerSection(), numerics, 0, 1, batch.width), layout)
        if change is not None:
            change(scorer.model)
        return scorer.score(batch)[1][batch.loss_mask].double()

    exact, native = logprobs("exact", "fp8"), logprobs("native", "fp8")
    of_fp8 = _apart(exact, logprobs("exact", "bf16"))
    parts = {
        "d": _apart(exact, native),
        "of FP8": of_fp8,
        "d in BF16": _apart(logprobs("exact", "bf16"), logprobs("native", "bf16")),
        "tokens": float(batch.loss_mask.sum()),
    }
    if "deepseek" in name or "flash" in name:
        parts["d, latents not quantized"] = _apart(exact, logprobs("native", "fp8", _plain_latents))
    return Result(
        name=f"mean |d| of native mode / mean change by FP8, {name}",
        value=parts["d"] / of_fp8,
        bar=1.0,
        at_least=False,
        parts=parts,
    )


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())


def _plain_latents(model: Any) -> None:
    """Have Megatron's expansion of latents take them as they are, as engines do."""

    def product(self: Any, input: Tensor, weight: Tensor, *args: Any, **context: Any) -> Tensor:
        return F.linear(input, self.precision.operand(weight))

    for layer in model.decoder.layers:
        up = layer.self_attention.linear_kv_up_proj
        up._forward_impl = MethodType(product, up)


def _taught() -> TokenBatch:
    """The first problems of the warm start with their answers, which alone count."""
    tokenizer = AutoTokenizer.from_pretrained("examples/models/tiny_qwen3_moe")
    problems = load_problems(Source(Path("examples/data/arithmetic_sft.jsonl")))[:128]
    rows = [(prompt_ids(tokenizer, p), tokenizer(p.answer, add_special_tokens=False).input_ids) for p in problems]
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        tokens[row, : lengths[row]] = torch.tensor(prompt + answer)
        mask[row, len(prompt) : lengths[row]] = True
    return TokenBatch(tokens, lengths, mask, 1.0)
