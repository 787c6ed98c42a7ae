"""A tiny model, and one stock SGLang server for all tests that only talk to a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8rl.rollout.engine.server import SGLangServer
from tests.support.servers import EOS, VOCABULARY, group_members, shared_memory, small_config


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BF16 Qwen3-MoE of one layer whose vocabulary is so small that EOS comes up often."""
    return _make_model(tmp_path_factory.mktemp("tiny_model"), seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return _make_model(tmp_path_factory.mktemp("other_model"), seed=1)


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """Started in a directory that would break it if it imported from there."""
    folder = tmp_path_factory.mktemp("server")
    for module in ("random", "fp8rl", "sglang"):
        (folder / f"{module}.py").write_text("raise RuntimeError('of the current directory')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        running = SGLangServer.start(tiny_model, small_config(), log_path=folder / "engine.log", weight_version=3)
    traces = [running._scratch, *shared_memory(group_members(running.pid))]
    yield running
    began = time.monotonic()
    running.stop()
    running.stop()
    assert time.monotonic() - began < 15 and not running.alive()
    assert group_members(running.pid) == [] and not any(path.exists() for path in traces), "it leaves nothing"


def _make_model(folder: Path, seed: int) -> Path:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        bos_token_id=None,
        initializer_range=0.05,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
