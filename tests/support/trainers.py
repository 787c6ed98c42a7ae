"""What the trainer's fixtures make."""

from collections.abc import Callable
from typing import Any

MakeTrainer = Callable[..., Any]
"""Makes a one-rank trainer of a model directory; see tests/trainer/conftest.py."""
