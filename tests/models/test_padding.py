"""Models whose widths end within a quantization block, filled up with zeros: the same function, and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from fp8rl.models import read_model
from fp8rl.models.checkpoint.padding import UNPADDED, padded, unpadded
from fp8rl.numerics.core.errors import UserError
from tests.support.padded import MIXTRAL, NINE_HEADS, QWEN2, SMOL, logits, weights, whole_blocks, write
from tests.support.tiny_model import TinyModel


@pytest.mark.parametrize("shape", [SMOL, NINE_HEADS, QWEN2, MIXTRAL], ids=["llama", "heads", "qwen2", "mixtral"])
def test_a_padded_model_is_the_same_function_and_comes_back(shape: TinyModel, tmp_path: Path) -> None:
    source = write(tmp_path / "source", shape)
    with pytest.raises(UserError, match=r"convert MODEL OUT --pad"):
        whole_blocks(read_model(source))
    padded(source, tmp_path / "padded", "MODEL", whole_blocks)
    expected = logits(source)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(logits(tmp_path / "padded"), expected, rtol=0, atol=1e-5)
    unpadded(tmp_path / "padded", tmp_path / "back", "MODEL")
    before, after = weights(source), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, each in before.items():
        torch.testing.assert_close(after[name], each, rtol=3e-7 if name.endswith("norm.weight") else 0, atol=0)
    configs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "back"))
    first, second = ({key: value for key, value in each.items() if key != "head_dim"} for each in configs)
    assert first == second


def test_a_llama_whose_heads_do_not_divide_its_new_width_becomes_a_mistral(tmp_path: Path) -> None:
    """Also where its config.json leaves out a number that the two have by other defaults."""
    source = write(tmp_path / "source", dataclasses.replace(SMOL, hidden=200, heads=5, kv_heads=5, head_dim=128))
    config = json.loads((source / "config.json").read_text())
    assert config.pop("num_key_value_heads") == 5
    (source / "config.json").write_text(json.dumps(config))
    padded(source, tmp_path / "padded", "MODEL", whole_blocks)
    found = read_model(tmp_path / "padded")
    assert found.architecture.name == "MistralForCausalLM"
    assert (found.sizes.hidden_size, found.sizes.kv_heads) == (256, 5)
    torch.testing.assert_close(logits(tmp_path / "padded"), logits(source), rtol=0, atol=1e-5)
    unpadded(tmp_path / "padded", tmp_path / "back", "MODEL")
    assert json.loads((tmp_path / "back/config.json").read_text()) == config


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (TinyModel(), "found 'whole blocks in every width'"),
        (dataclasses.replace(SMOL, hidden=64, heads=1, kv_heads=1, intermediate=60), "intermediate_size: found 60"),
        (dataclasses.replace(SMOL, head_dim=96), "2 \\* head_dim|head_dim: found 96"),
        (dataclasses.replace(SMOL, family="qwen3"), "the norm model.layers.0.self_attn.q_norm.weight"),
        (dataclasses.replace(SMOL, family="qwen3", hidden=256), ""),
        (TinyModel(layers=4, hidden=192, family="qwen3_next"), "in which padding would change the mean or the epsilon"),
    ],
)
def test_what_zeros_would_change_is_refused(shape: TinyModel, says: str, tmp_path: Path) -> None:
    """Norms of heads share their epsilon with those that change, but not where the model is as wide as before."""
    source = write(tmp_path / "source", shape, torch.bfloat16)
    if not says:
        padded(source, tmp_path / "out", "MODEL", whole_blocks)
        return
    with pytest.raises(UserError, match=says):
        padded(source, tmp_path / "out", "MODEL", whole_blocks)
    assert not (tmp_path / "out").exists()


def test_only_what_was_padded_is_taken_back(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=UNPADDED):
        unpadded(write(tmp_path / "source", TinyModel()), tmp_path / "out", "MODEL")
