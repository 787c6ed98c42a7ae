"""The table against mbridge's own definitions of the architectures: names, fused layouts, and parts for each rank."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from fp8rl.trainer.weights.export import TableBridge


class Split:
    """A parameter as one of several ranks holds it."""

    tensor_model_parallel = True

    def __init__(self, partition_dim: int, shape: list[int]) -> None:
        self.partition_dim = partition_dim
        shape[partition_dim] //= 2
        self.shape = tuple(shape)


@pytest.fixture
def their_bridges(monkeypatch: pytest.MonkeyPatch) -> None:
    """mbridge's own bridges, which the trainer leaves out."""
    monkeypatch.delitem(sys.modules, "mbridge.models")
    importlib.import_module("mbridge.models")


@pytest.mark.usefixtures("their_bridges")
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_every_parameter_is_the_tensors_that_mbridge_says(kind: str, request: Any, make_trainer: Any) -> None:
    from mbridge import AutoBridge

    from fp8rl.trainer.modules.weights import named_weights

    path: Path = request.getfixturevalue(f"{kind}_path")
    trainer = make_trainer(path)
    config = AutoConfig.from_pretrained(path)
    config.tie_word_embeddings = False
    theirs = AutoBridge.from_config(config, dtype=torch.bfloat16)
    ours = TableBridge(trainer.definition.tensors, trainer.model.config)
    for name, parameter in named_weights(trainer.model):
        names = theirs._weight_name_mapping_mcore_to_hf(name)
        assert [row.name for row in ours.rows(name)] == names, name
        value = torch.arange(parameter.numel(), dtype=torch.int32).view(parameter.shape)
        for (found_name, found), (expected_name, expected) in zip(
            zip(*ours._weight_to_hf_format(name, value)), zip(*theirs._weight_to_hf_format(name, value)), strict=True
        ):
            assert found_name == expected_name and torch.equal(found, expected), name
        parts = ours._weight_to_hf_format(name, value)[1]
        assert torch.equal(ours._weight_to_mcore_format(name, parts), value), name
        if parameter.dim() == 2 and ".experts." not in name and "router" not in name:
            split = Split(parameter.partition_dim, list(parameter.shape))
            shares = ours._weight_split_across_tp(name, value, split, 2)
            expected_shares = theirs._weight_split_across_tp(name, value, split, 2)
            assert all(torch.equal(a, b) for a, b in zip(shares, expected_shares, strict=True)), name
            theirs.mpu.tp_size = 2
            assert torch.equal(ours._weight_merge_across_tp(name, list(shares), split), value), name
            assert torch.equal(theirs._weight_merge_across_tp(name, list(shares), split), value), name
            theirs.mpu.tp_size = 1
