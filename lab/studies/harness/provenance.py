"""Where a result comes from: commit, versions, processor, date."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

CODE = Path(__file__).resolve().parents[3]
"""The checkout of the code that measures, wherever it is called from."""
_WRITTEN_HERE = (":(top,exclude)docs/studies", ":(top,exclude)docs/studies.md")
"""What the studies before this one have written; no study reads it."""
PACKAGES = ("torch", "sglang", "megatron-core", "transformers", "numpy", "scipy")


def provenance() -> dict[str, Any]:
    """What measured, as JSON values.

    `commit` is null outside a checkout; `dirty`: the checkout has changes that are not committed.
    """
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *_WRITTEN_HERE)),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "cpu": processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def processor() -> str:
    """The CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=CODE, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
