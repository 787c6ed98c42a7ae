from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.conversations import Stage
from tests.support.paths import EXAMPLES


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe")


@pytest.fixture
def play(tokenizer: Any) -> Stage:
    return Stage(tokenizer)
