"""Write the lists of compiled kernels again, without a GPU: `python -m lab.kernel_lists`.

The start-up probe, an engine's batches and a trainer's micro-batches run on the meta device, and Triton is stopped
where it would compile. A list keeps the kernels that have its arguments today, and gets those that these calls launch.

With Triton 3.6.0 in PYTHONPATH the list of `lab.bench.gpu.fifteen` is written, otherwise those of `examples/kernels`.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from fp8rl.diagnose.plan.subject import CONFIGS
from fp8rl.models import read_model
from fp8rl.numerics import ops, probe
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.digest import CHUNK, chunk_sums
from fp8rl.numerics.kernels import cache
from fp8rl.numerics.weight_cache import WeightCache
from fp8rl.rl.experiment import load_experiment
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from lab.bench.gpu.exactness import HEAD, SPEC, Pages, engine_forward, make_layer, make_norm
from lab.bench.gpu.fifteen.kernels import LIST, fits, listed
from lab.bench.gpu.measure import Layers, random
from tests.support.launches import META, address
from tests.support.meta_model import built, layout_of, wrapped
from tests.support.paths import EXAMPLES

POWERS = [1 << each for each in range(9)]


@contextlib.contextmanager
def noted() -> Iterator[set[cache.Variant]]:
    """Inside, the variants that would be compiled are noted, and nothing runs."""
    found: set[cache.Variant] = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel, target = fn.jit_function, {"target": cache.NoDevice().get_current_target().__dict__}
        data = target | json.loads(compile["specialization_data"])  # Triton 3.6.0 does not describe the target
        found.add(cache.described(f"{kernel.module}:{kernel.fn.__qualname__}", json.dumps(data)))
        return True  # it is left out

    hooked = mock.patch.object(triton.knobs.runtime, "jit_cache_hook", note)
    with cache.no_device(), using("triton"), hooked, mock.patch.object(Tensor, "data_ptr", address):
        yield found


def whole(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


@torch.no_grad()
def launch_start() -> None:
    """Launch what a process tries when it starts, and the digests. Tiles of all sizes are allowed afterwards."""
    with mock.patch.object(torch, "equal", lambda one, other: True):
        probe.choose_tiles(META)
        probe.row_variant_ops(META)
    for words in (CHUNK, 3):
        chunk_sums([whole(1, words, dtype=torch.int32)])


@torch.no_grad()
def launch_engine(path: Path, context: int) -> None:
    """Launch an engine's steps of all sizes, and its draws. path: of a model with layers of Qwen3's MoE models."""
    of = read_model(path).sizes
    shape = Layers(1, of.hidden_size, of.heads, of.kv_heads, of.experts, of.top_k, of.expert_size, of.vocab_size)
    layer, norm = make_layer(shape, META), make_norm(shape.hidden, META)
    head = random(shape.vocab, shape.hidden, device=META)
    decoded = [(rows, rows) for rows in (*POWERS, *range(12, 256, 12))]
    prefilled = [(tokens, few) for tokens in (17, 128, 1000, 8192) for few in POWERS if few < tokens]
    for tokens, sequences in decoded + prefilled:
        kept = whole(2, 1 << 16, shape.kv_heads, HEAD, dtype=torch.bfloat16)
        new = None if tokens == sequences else whole(sequences, dtype=torch.int32)
        table = whole(sequences + 1, context + 4, dtype=torch.int32)  # SGLang adds 4
        pages = Pages(table, whole(sequences), new, whole(sequences), whole(tokens))
        x = engine_forward(head[whole(tokens)], whole(tokens), [layer], [kept], pages, norm, shape)
        logits, temperatures = ops.linear(x[:sequences], head).float(), whole(sequences, dtype=torch.float32)
        limits = temperatures, whole(sequences), temperatures
        drawn = ops.draw(logits, temperatures, whole(sequences), whole(sequences))
        ops.token_logprobs(logits, drawn, temperatures)
        ops.narrowed(logits, ops.truncation_floors(logits, temperatures, *limits))


def launch_trainer(path: Path, rows: int, tokens: int, adapter: Any = None) -> None:
    """Launch micro-batches of few tokens and of many, without and with a backward pass."""
    from fp8rl.trainer.adapters import attach
    from fp8rl.trainer.step.head import head_of
    from fp8rl.trainer.weights.hf_weights import HFWeights

    model = built(path, TrainerSection(), NumericsConfig(spec=SPEC), tokens)
    if adapter is not None:
        of_model = HFWeights(
            path, read_model(path).adapted(adapter), SPEC.weight, WeightCache(), Layout.of(0, TrainerSection())
        )
        attach(model, of_model, WeightCache(), adapter, 0)
    trained, head = wrapped(model), head_of(model)
    model.post_process = False
    for shape in ((1, 17), (3, 48), (rows, tokens)):
        for training in (False, True):
            with torch.set_grad_enabled(training):
                hidden = trained(whole(*shape), position_ids=None, attention_mask=None)
                logits = head(hidden.flatten(0, 1).unsqueeze(1)).transpose(0, 1)
                values, entropy = ops.token_logprobs(logits, whole(1, logits.shape[1]), 1.0)
            if training:
                (values.sum() + entropy.sum()).backward()


def launch_example(name: str) -> None:
    """Launch a trainer of an example, and an engine if layers are those of Qwen3's MoE models."""
    experiment = load_experiment(EXAMPLES / f"{name}.yaml")
    path, context = experiment.model.directory, experiment.rollout.context_length
    launch_trainer(path, experiment.trainer.micro_batch_tokens // context, context, experiment.adapter)
    if path.name == "tiny_qwen3_moe":
        launch_engine(path, context)


def launch_large(rows: int, tokens: int) -> None:
    """Launch trainer and engine of Qwen3-30B-A3B with one layer."""
    config = json.loads((CONFIGS / "qwen3_30b_a3b/config.json").read_text()) | {"num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        launch_trainer(Path(folder), rows, tokens)
        launch_engine(Path(folder), tokens)


def renewed(before: list[cache.Variant], calls: list[Callable[[], None]]) -> list[cache.Variant]:
    with noted() as found:
        launch_start()
        for call in calls:
            call()
    kept = [each for each in before if fits(each)]
    new = sorted(found - {*kept}, key=cache.Variant.line)
    print(f"{len(before)} kernels, {len(before) - len(kept)} dropped, {len(new)} new")
    return kept + new


def main() -> None:
    layout_of(TrainerSection(), 0)
    if triton.__version__.startswith("3.6."):
        names = ("arithmetic", "arithmetic_deepseek", "arithmetic_qwen3_5", "arithmetic_lora")
        found = renewed(listed(), [lambda: launch_large(4, 4096), *(partial(launch_example, name) for name in names)])
        lines = [json.dumps([each.kernel, each.data]) for each in found]
        LIST.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))
        return
    lists = {"arithmetic": partial(launch_example, "arithmetic"), "qwen3_30b_a3b": partial(launch_large, 2, 4092)}
    for name, call in lists.items():
        path = EXAMPLES / f"kernels/{name}.jsonl"
        found = renewed(cache.read_list(path), [call])
        path.write_text("".join(f"{each.line()}\n" for each in found))


if __name__ == "__main__":
    main()
