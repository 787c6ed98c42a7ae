import shutil

import pytest

from tests.support.preconditions import write_lines
from tests.support.tiny_model import TinyModel, write_tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two small model directories, `moe` and `dense`, that tests must not change."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "moe", TinyModel(heads=4, kv_heads=2))
    write_tiny_model(folder / "dense", TinyModel(heads=4, kv_heads=2, experts=0, intermediate=384))
    return folder


@pytest.fixture
def model(models, tmp_path):
    """A private copy of the MoE model."""
    return shutil.copytree(models / "moe", tmp_path / "model")


@pytest.fixture
def values(model, tmp_path):
    """A spec that passes, as plain values."""
    write_lines(tmp_path / "train.jsonl", [("9+4=?", "#### 13")] * 3)
    write_lines(tmp_path / "eval.jsonl", [("1+4=?", "#### 5")] * 2)
    return {
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl")},
        "eval": {"problems": 2},
    }
