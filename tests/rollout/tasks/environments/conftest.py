from __future__ import annotations

from typing import Any

import pytest

from tests.support.conversations import Stage


@pytest.fixture
def play(tokenizer: Any) -> Stage:
    return Stage(tokenizer)
