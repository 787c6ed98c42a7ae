"""Weights, caches and FLOPs of a model, against published counts and what torch counts of transformers' models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from fp8rl.models import read_shape
from fp8rl.models.families.gated_delta import GatedDelta
from tests.support.models import token_by_token
from tests.support.paths import CONFIGS
from tests.support.tiny_model import TinyModel, write_tiny_model

PUBLISHED = {
    "qwen3_4b": (4_022_468_096, 147_456),
    "qwen3_8b": (8_190_735_360, 147_456),
    "qwen3_30b_a3b": (30_532_122_624, 98_304),
    "qwen3_235b_a22b": (235_093_634_560, 192_512),
    "llama_3_1_8b": (8_030_261_248, 131_072),
    "deepseek_v3": (671_026_419_200, 70_272),
    "glm_4_7_flash": (29_943_393_920, 54_144),
    "moonlight_16b_a3b": (15_960_110_208, 31_104),
    "qwen3_5_35b_a3b": (34_660_610_688, 20_480),
    "qwen3_5_4b": (4_205_751_296, 32_768),
    "qwen3_5_9b": (8_953_803_264, 32_768),
    "smollm2_135m": (159_291_520, 30_720),
    "smollm2_mixture": (220_265_640, 30_720),
}
"""Parameters, and bytes of a token in a BF16 KV cache. SmolLM2 and its mixture are counted with the zeros that
fill their blocks."""


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.iterdir()))
def test_parameters_and_cache_are_the_published_ones(name: str) -> None:
    shape = read_shape(CONFIGS / name)
    assert (shape.parameters, shape.kv_bytes()) == PUBLISHED.get(name)


def test_a_request_of_qwen3_5_holds_its_states_worked_by_hand() -> None:
    """30 layers: 32 heads of 128 x 128 in FP32, and three rows of 8,192 channels in BF16; shared by two ranks."""
    shape = read_shape(CONFIGS / "qwen3_5_35b_a3b")
    assert shape.request_bytes() == 30 * (4 * 32 * 128 * 128 + 2 * 3 * 8192) == 2 * shape.request_bytes(2)
    assert read_shape(CONFIGS / "qwen3_8b").request_bytes() == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_transformers_model(name: str) -> None:
    values = json.loads((CONFIGS / name / "config.json").read_text())
    values.pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    bias = sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert sum(parameter.numel() for parameter in model.parameters()) + bias == read_shape(CONFIGS / name).parameters


@pytest.mark.slow
@pytest.mark.parametrize("family", TinyModel.families())
def test_flops_are_those_that_torch_counts_of_transformers_model(family: str, tmp_path: Path) -> None:
    """Of a forward without a mask that saves anything; the rest is the rotation, a product of angles and positions, of
    Qwen3.5 three times. A rule that goes token by token is no product, so that torch does not count it; it counts three
    more results of the convolution, which are thrown away. An indexer's choice of all keys is not computed here."""
    kv_heads = 2 if family == "olmoe" else 1
    write_tiny_model(tmp_path / "model", TinyModel(family=family, hidden=256, heads=2, kv_heads=kv_heads))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", experts_implementation="eager"
    )
    token_by_token(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(24)[None], use_cache=False)
    shape, axes = read_shape(tmp_path / "model"), 3 if family.startswith("qwen3_5") else 1
    of_a_token = 2 * shape.active_parameters + shape.attention_flops(24) + axes * shape.sizes.rotary_dim
    not_counted = sum(
        (24 * 7 * own.state - 3 * 2 * own.taps * own.channels) * len(own.layers)
        for own in shape.sizes.own
        if isinstance(own, GatedDelta)
    )
    by_module = counter.get_flop_counts().items()
    of_indexers = sum(sum(ops.values()) for name, ops in by_module if name.endswith(".indexer"))
    assert counter.get_total_flops() - of_indexers == 24 * of_a_token - not_counted


def test_flops_of_deepseek_v3_are_those_of_its_report() -> None:
    """Pretraining took 272.8 G tokens a day on 2,048 H800."""
    shape = read_shape(CONFIGS / "deepseek_v3")
    assert shape.training_flops(4096) == pytest.approx(250e9, rel=0.01)
    rate = 272.8e9 / 86400 / 2048
    assert rate * shape.training_flops(4096) == pytest.approx(385e12, rel=0.01)
    assert rate * shape.training_flops(2 * 4096) == pytest.approx(432e12, rel=0.01)  # as many keys as tokens


def test_activations_worked_by_hand() -> None:
    """Qwen3-30B-A3B: the review of the GPU path found 140 KB per token and layer."""
    kept = read_shape(CONFIGS / "qwen3_30b_a3b").activations(0)
    assert kept.bf16 == 8 * 2048 + 6 * 128 * 36 + 8 * (4 * 2048 + 6 * 768) + 4 * 128
    assert kept.bf16 == pytest.approx(140 * 1024, rel=0.03)
    assert kept.fp8 == pytest.approx(1.03 * 32 * 128 - 0.97 * (2048 + 8 * (2048 + 768)))
