"""A cache of the hub's clients with a model in it, as a download leaves one, and no network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

NAME, COMMIT = "owner/tiny", "0123456789abcdef0123456789abcdef01234567"


def cache_model(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a model's directory into a new cache as NAME at COMMIT; returns where it lies."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = cache / "models--owner--tiny"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(model, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    return snapshot
