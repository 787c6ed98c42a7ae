"""What a layer launches in a decode step on a GPU, op by op as the hooks call them, counted on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl.diagnose.plan.decode import BESIDE_LAYERS, OF_LAYER
from tests.support.elsewhere import found_elsewhere

pytestmark = pytest.mark.slow

OF_EXPERTS = {
    "input_norm": ["norm._forward_kernel"],
    "qkv": ["gemm._product_kernel"],
    "q_norm": [],
    "k_norm": [],
    "rope": ["rope._heads_kernel"],
    "attention": ["forward._forward_kernel", "chunks._merge_kernel"],
    "o_proj": ["quantize._rows_kernel", "gemm._product_kernel"],
    "post_norm": ["norm._forward_kernel"],
    "router": ["gemm._product_kernel"],
    "topk": ["router._route_kernel"],
    "experts": [
        "gather._gather_kernel",
        "gemm._product_kernel",
        "swiglu._forward_kernel",
        "gemm._product_kernel",
        "combine._combine_kernel",
    ],
}
"""Of a layer of Qwen3-30B-A3B in FP8, 64 answers of up to 4,096 tokens. With 256 answers no chunks are merged."""

SCRIPT = """
import json
from pathlib import Path
import torch
from fp8rl.models import read_model
from fp8rl.models.trace import TOKENS
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.kernels.products import tiles
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin.launches import MetaEngine
from fp8rl.rollout.engine.plugin.families import sides
from fp8rl.rollout.engine.plugin.state import configure, state
from tests.support.launches import launches

tiles.allow_short(True)
tiles.allow_wide(True)

def counted(config, rollout, batch):
    model = read_model(Path("fp8rl/diagnose/plan/configs") / config, served=True)
    numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"), rollout=rollout)
    configure(numerics)
    engine = state().weights = MetaEngine(model, numerics, 1, batch, batch, 4096, True)
    values, found = {TOKENS: engine.whole(batch)}, []
    with using("triton"), torch.no_grad():
        for site in engine.sites:
            with launches() as launched:
                read = [values.get(name) for name in site.op.reads]
                values |= zip(site.op.writes, sides()[site.op.form].launch(engine, site, *read), strict=True)
            found.append((site.layer, site.op.name, [*launched.torch.elements(), *launched.kernels.elements()]))
    return found

counted("qwen3_30b_a3b", "fp8", 64)  # what is made once
configs = ("qwen3_8b", "qwen3_30b_a3b")
every = ((config, rollout) for config in configs for rollout in ("fp8", "bf16"))
print(json.dumps({f"{config} {rollout}": counted(config, rollout, 64) for config, rollout in every}))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    return found_elsewhere(SCRIPT)


def test_a_layer_of_experts_launches_fifteen_kernels(found: Any) -> None:
    launched = {op: names for layer, op, names in found["qwen3_30b_a3b fp8"] if layer == 0}
    assert {op: sorted(names) for op, names in launched.items()} == {
        op: sorted(each) for op, each in OF_EXPERTS.items()
    }


def test_the_planner_counts_what_is_launched(found: Any) -> None:
    """Beside what SGLang launches: the embedding, and in a dense layer the kernel that writes the cache."""

    def total(ops: Any, layer: int | None) -> int:
        return sum(len(names) for where, _, names in ops if where == layer)

    for fp8, rollout in ((True, "fp8"), (False, "bf16")):
        dense, experts = (found[f"{config} {rollout}"] for config in ("qwen3_8b", "qwen3_30b_a3b"))
        assert OF_LAYER["exact", fp8] == (total(dense, 0) + 1, total(experts, 0))
        assert {1 + total(dense, None), 1 + total(experts, None)} == {BESIDE_LAYERS}
