"""Frequencies of lengthened contexts, against two other implementations of them."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fp8rl.numerics import ops
from fp8rl.numerics.ops.rope import Llama3, frequencies

SCALINGS = {
    "8b": (5e5, 128, Llama3(factor=8.0, original=8192, low=1.0, high=4.0)),
    "1b": (5e5, 64, Llama3(factor=32.0, original=8192, low=1.0, high=4.0)),
    "other": (1e4, 64, Llama3(factor=4.0, original=256, low=1.5, high=3.0)),
}


def of_transformers(theta, dim, scaling):
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": scaling.factor}
    rope |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    rope |= {"original_max_position_embeddings": scaling.original}
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, max_position_embeddings=1 << 17)
    config.rope_parameters = rope
    return ROPE_INIT_FUNCTIONS["llama3"](config)[0]


def of_sglang(theta, dim, scaling):
    variants = pytest.importorskip("sglang.srt.layers.rotary_embedding.rope_variant")
    module = variants.Llama3RotaryEmbedding.__new__(variants.Llama3RotaryEmbedding)
    nn.Module.__init__(module)
    module.rotary_dim, module.orig_max_position, module._force_native = dim, scaling.original, False
    module.scaling_factor, module.low_freq_factor, module.high_freq_factor = scaling.factor, scaling.low, scaling.high
    return module._compute_inv_freq(theta)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theirs", (of_transformers, of_sglang))
def test_frequencies_of_llama_3_are_those_of_other_implementations(monkeypatch, theirs, name):
    """To the bit, in FP32, where their arithmetic is FP64 as ours; in FP32 they are off by its roundings."""
    ours = frequencies(*SCALINGS[name])
    rounded = theirs(*SCALINGS[name])
    assert rounded.dtype == torch.float32 and ((rounded - ours) / ours).abs().max() < 4e-7
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)  # the name by which both ask for their dtype
        exact = theirs(*SCALINGS[name])
    assert exact.dtype == torch.float64 and torch.equal(exact.float(), ours.float())


def test_a_scaled_rotation_turns_by_its_frequencies():
    theta, dim, scaling = SCALINGS["other"]
    x, positions = torch.randn(1, 3, 2, dim).bfloat16(), torch.tensor([[0, 300, 2000]])
    angle = positions[..., None, None] * frequencies(theta, dim, scaling)
    first, second = x.double().chunk(2, -1)
    exact = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)
    found = ops.rope(x, positions, theta, None, scaling)
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()
    assert not torch.equal(found[:, 1:], ops.rope(x, positions, theta)[:, 1:])
