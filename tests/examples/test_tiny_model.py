"""The tiny model of the examples."""

import pytest
import torch
from safetensors.torch import load_file

from fp8rl.numerics.core.errors import UserError
from fp8rl.rollout.types import Problem, prompt_ids
from tests.support.tiny_model import TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """The directory of a small mixture of experts."""
    path = tmp_path_factory.mktemp("models") / "moe"
    write_tiny_model(path, TinyModel(heads=4, kv_heads=2))
    return path


def test_the_tiny_model_renders_prompts_and_decodes_characters(moe):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(moe)
    ids = prompt_ids(tokenizer, Problem("9+4=?", ""))
    assert tokenizer.decode(ids) == "<|user|>9+4=?<|assistant|>" and len(ids) == 7
    text = "a b\n c  d #### -7~"
    encoded = tokenizer(text, add_special_tokens=False).input_ids
    assert len(encoded) == len(text) and tokenizer.decode(encoded) == text
    assert tokenizer.decode([*encoded, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer) == 128


def test_the_tiny_model_is_bf16_per_expert_on_disk_and_fixed_by_its_seed(moe, tmp_path):
    weights = load_file(moe / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert weights["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (128, 128)
    write_tiny_model(tmp_path / "same", TinyModel(heads=4, kv_heads=2))
    write_tiny_model(tmp_path / "other", TinyModel(heads=4, kv_heads=2), seed=1)
    same, other = (load_file(tmp_path / name / "model.safetensors") for name in ("same", "other"))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not torch.equal(weights["lm_head.weight"], other["lm_head.weight"])


def test_the_tiny_model_refuses_what_it_cannot_write(moe, tmp_path):
    with pytest.raises(UserError, match="exist"):
        write_tiny_model(moe)
    with pytest.raises(UserError, match="--vocab"):
        write_tiny_model(tmp_path / "x", TinyModel(vocab=100))
    with pytest.raises(UserError, match="--kv-heads and --hidden: found .1 and 128., expected 2 and 256 in an OLMoE"):
        write_tiny_model(tmp_path / "x", TinyModel(family="olmoe"))
    assert list(tmp_path.iterdir()) == []
