"""Bytes of a sync and of an engine, calculated. `test_quantized.py` holds them against what is sent."""

from __future__ import annotations

import pytest

from fp8rl.models import read_shape
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.served import served_bytes
from tests.support.paths import CONFIGS, EXAMPLES

FP8, BF16 = QuantSpec.preset("fp8_block_pow2"), QuantSpec.preset("bf16")


def test_bf16_takes_two_bytes_of_a_parameter() -> None:
    shape = read_shape(CONFIGS / "qwen3_4b")
    assert served_bytes(shape, BF16) == 2 * shape.parameters


def test_the_demo_model_worked_by_hand() -> None:
    """Two layers of 13 x 3 blocks of 128 x 128 less the norms, the router and both ends."""
    quantized = 2 * (128 * 512 + 256 * 128 + 8 * 3 * 128 * 128)
    shape = read_shape(EXAMPLES / "models/tiny_qwen3_moe")
    assert served_bytes(shape, FP8) == 2 * (shape.parameters - quantized) + quantized + 4 * quantized // 128**2


def test_an_engine_of_qwen3_30b_takes_what_the_review_found() -> None:
    assert served_bytes(read_shape(CONFIGS / "qwen3_30b_a3b"), FP8) / 2**30 == pytest.approx(29.0, abs=0.05)


def test_ranks_of_an_engine_share_all_but_norms_and_routers() -> None:
    shape = read_shape(CONFIGS / "qwen3_30b_a3b")
    replicated = sum(2 * w.size * w.count for w in shape.weights if w.share == "replicated")
    assert 8 * served_bytes(shape, FP8, 8) == served_bytes(shape, FP8) + 7 * replicated


def test_layers_in_bf16_and_ragged_blocks_are_counted_as_such() -> None:
    shape = read_shape(CONFIGS / "deepseek_v3")
    spec = FP8.override({"first_layers_bf16": 61})
    assert served_bytes(shape, spec) == 2 * shape.parameters
    (kv_a,) = (weight for weight in shape.weights if weight.kind == "kv_a_proj")
    one = FP8.override({"first_layers_bf16": 60})
    # 576 rows are four and a half blocks: five rows of scales.
    quantized = [w for w in shape.weights if w.kind and 60 in w.layers]
    scales = sum(w.copies * sum(-(-n // 128) for n in w.pieces or (w.rows,)) * -(-w.columns // 128) for w in quantized)
    assert -(-kv_a.rows // 128) == 5
    saved = sum(w.size * w.copies for w in quantized) - 4 * scales
    assert served_bytes(shape, spec) - served_bytes(shape, one) == saved
