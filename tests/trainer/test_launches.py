"""What the many small tensors of a model of experts cost in each micro-batch: launches, and hooks of Megatron's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fp8rl.models import read_model
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import WeightCache
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from tests.support.batches import cross_entropy, random_batch
from tests.support.launches import Made, interpreted_launches
from tests.support.paths import EXAMPLES
from tests.support.ranks import run_on_ranks
from tests.support.trainers import MakeTrainer

EXPERTS, TOKENS = 128, 4096


@contextmanager
def hooked() -> Iterator[list[torch.nn.Parameter]]:
    """Inside, models are wrapped so that the list gets each parameter whose hook was called."""
    from fp8rl.trainer.distributed.optimizer import DataParallel

    called: list[torch.nn.Parameter] = []
    make = DataParallel._make_backward_post_hook

    def counting(self: Any, parameter: torch.nn.Parameter) -> Any:
        hook = make(self, parameter)

        def call(*unused: object) -> None:
            called.append(parameter)
            hook(*unused)

        return call

    with mock.patch.object(DataParallel, "_make_backward_post_hook", counting):
        yield called


def _experts_on_meta(path: Path, layout: Layout, config: TrainerSection) -> dict[str, Any]:
    """What a layer's experts ask of a GPU for a micro-batch, once weights are quantized; in a process of its own."""
    from fp8rl.trainer.distributed.optimizer import wrap
    from fp8rl.trainer.megatron.lowering import Lowering
    from fp8rl.trainer.megatron.model import build_model
    from fp8rl.trainer.modules.precision import Precision

    torch.cuda.current_device = lambda: torch.device("meta")
    numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"), trainer="fp8")
    precision = Precision(numerics, WeightCache(), layers=2)
    experts = build_model(read_model(path), config, layout, precision, Lowering(), 512).decoder.layers[0].mlp.experts
    x = torch.empty(TOKENS, 256, dtype=torch.bfloat16, device="meta").requires_grad_()
    counts = torch.empty(EXPERTS, dtype=torch.int64, device="meta")
    with hooked() as called, using("triton"):
        wrapped = wrap(experts, Lowering(), experts.parameters())
        with interpreted_launches(run_kernels=False):
            experts(x, counts)  # quantizes the weights
        with Made() as made, interpreted_launches(run_kernels=False) as found:
            out, _ = experts(x, counts)
            out.backward(torch.empty_like(out))
    return {
        "ops": found.torch.total(),
        "kernels": found.kernels.total(),
        "hooks": len(called),
        "parameters": len(list(wrapped.parameters())),
        "stacks": [shape for shape in made.shapes if len(shape) == 3 and shape[0] == EXPERTS],
    }


@pytest.mark.slow
def test_a_layer_of_128_experts_takes_as_many_launches_as_one_of_few(moe_path: Path, tmp_path: Path) -> None:
    """With a parameter for each expert's matrix it took 284 ops and 256 hooks. There is no tensor of all gradients."""
    config = json.loads((moe_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": EXPERTS, "num_local_experts": EXPERTS}))
    (found,) = run_on_ranks(TrainerSection(), tmp_path / "ranks", partial(_experts_on_meta, tmp_path))
    assert found["hooks"] == found["parameters"] == 2
    assert found["ops"] <= 30 and 10 <= found["kernels"] <= 15
    assert found["stacks"] == []


def test_hooks_of_a_micro_batch_do_not_grow_with_experts(make_trainer: MakeTrainer) -> None:
    """Nine parameters in each of two layers, and three outside them; the demo's model had 49 with eight experts."""
    with hooked() as called:
        trainer = make_trainer(EXAMPLES / "models/tiny_qwen3_moe", "fp8", micro_batch_tokens=512)
    batch = random_batch(rows=2, longest=20)
    trainer.forward_backward(batch, cross_entropy(batch))
    assert len(called) == 2 * 9 + 3
    assert set(map(id, called)) == set(map(id, trainer.model.parameters()))
