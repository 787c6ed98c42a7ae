"""Safetensors files that we write: equal contents are equal bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from fp8rl.models.checkpoint.writing import write_tensors

METADATA = {"format": "pt", "base_digest": 'a \u00e9 "quoted" \\ \n', "another": "", "b": "7"}


def test_files_have_the_same_bytes_whatever_the_order_of_a_hash_map(tmp_path: Path) -> None:
    """safetensors' own files of the same metadata differ, in one process too."""
    tensors = {"b": torch.arange(6).view(2, 3), "a": torch.ones(1, dtype=torch.bfloat16)}
    for number in range(12):
        write_tensors(tmp_path / str(number), tensors, METADATA)
    written = [file.read_bytes() for file in tmp_path.iterdir()]
    assert len(written) == 12 and len(set(written)) == 1
    with safe_open(next(tmp_path.iterdir()), framework="pt") as file:
        assert file.metadata() == METADATA
        assert torch.equal(file.get_tensor("b"), torch.arange(6).view(2, 3))
        assert torch.equal(file.get_tensor("a"), torch.ones(1, dtype=torch.bfloat16))


def test_a_file_without_or_with_one_key_is_as_safetensors_writes_it(tmp_path: Path) -> None:
    for metadata in ({}, {"format": "pt"}):
        write_tensors(tmp_path / "file", {"a": torch.ones(2)}, metadata)
        with safe_open(tmp_path / "file", framework="pt") as file:
            assert (file.metadata() or {}) == metadata and torch.equal(file.get_tensor("a"), torch.ones(2))
