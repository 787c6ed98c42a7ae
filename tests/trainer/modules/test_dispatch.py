"""How often a rank waits for the device in its layers: never where it has all experts, else once a layer for the sizes
of what other ranks send. On meta tensors nothing can be copied to the host, so that any other wait is an error."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.models import read_model
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.config import NumericsConfig
from fp8rl.trainer.config import TrainerSection
from tests.support.launches import Made, interpreted_launches
from tests.support.meta_model import built, layout_of, wrapped
from tests.support.ranks import in_a_fork
from tests.support.trainers import POW2

ROWS, LENGTH, RANKS, WORDS = 2, 64, 2, 1111


def waits_in_a_step(path: Path, ep: int) -> dict[str, Any]:
    """How often the layers of one rank of `ep` ask for numbers, forward and backward, and which tensors of the size of
    the vocabulary the backward makes."""
    from fp8rl.trainer.modules import dispatch

    config = TrainerSection(ep=ep, dp=ep)
    model = built(path, config, layout_of(config, 0), NumericsConfig(spec=POW2, trainer="fp8"))
    top_k, model_of_gradients = read_model(path).sizes.top_k, wrapped(model)
    waits = {"forward": 0, "backward": 0}
    phase, pairs = "forward", ROWS * LENGTH * top_k

    def on_host(sizes: torch.Tensor, rows: int) -> Any:
        waits[phase] += 1
        assert sizes.shape == (2, ep) and rows == pairs
        return [[pairs // ep] * ep] * 2

    dispatch.on_host = on_host
    tokens = torch.empty(ROWS, LENGTH, dtype=torch.int64, device="meta")
    model.post_process = False  # its head is none of the layers
    with using("triton"), interpreted_launches(run_kernels=False):
        hidden = model_of_gradients(tokens, position_ids=None, attention_mask=None)
        phase = "backward"
        with Made() as made:
            hidden.sum().backward()
    whole = [shape for shape in made.shapes if WORDS in shape]
    return {**waits, "whole": whole, "layers": sum("router.weight" in name for name, _ in model.named_parameters())}


def of_its_own_vocabulary(path: Path, into: Path) -> Path:
    """A model with a vocabulary that no other size is equal to."""
    config = json.loads((path / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    (into / "config.json").write_text(json.dumps(config | {"vocab_size": WORDS}))
    return into


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_rank_with_all_experts_never_waits(family: str, moe_path: Path, latent_path: Path, tmp_path: Path) -> None:
    path = of_its_own_vocabulary({"qwen3_moe": moe_path, "deepseek_v3": latent_path}[family], tmp_path)
    found = in_a_fork(tmp_path, partial(waits_in_a_step, path, 1))
    assert found["layers"] > 0 and (found["forward"], found["backward"]) == (0, 0)
    assert found["whole"] == [], "the embedding's gradient is added to Megatron's sum, token by token"


@pytest.mark.slow
def test_a_rank_of_several_waits_once_a_layer(moe_path: Path, tmp_path: Path) -> None:
    found = in_a_fork(tmp_path, partial(waits_in_a_step, of_its_own_vocabulary(moe_path, tmp_path), RANKS))
    assert (found["forward"], found["backward"]) == (found["layers"], 0)
