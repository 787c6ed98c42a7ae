"""An engine whose plugin did not load, or not wholly, is refused before its first token."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.types import HandshakeError
from fp8rl.weight_sync.served import convert_checkpoint
from tests.support.plants import PLANT, renamed_target
from tests.support.rig import make_engine

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("warm_engines")]

FP8 = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
BF16 = NumericsConfig(spec=FP8.spec, rollout="bf16")


def refusal(models: dict[str, Path], folder: Path, numerics: NumericsConfig, **changes: Any) -> str:
    """What the engine's owner is told. The engine is gone then."""

    async def start() -> None:
        engine = make_engine(folder / "engine.log", numerics, **changes)
        try:
            await engine.start(folder / "served")
        finally:
            await engine.stop()

    convert_checkpoint(models["moe"], folder / "served", numerics.rollout_spec)
    with pytest.raises(HandshakeError) as error:
        asyncio.run(start())
    return str(error.value)


def test_a_plugin_with_a_malformed_configuration(models: dict[str, Path], tmp_path: Path) -> None:
    """With BF16 weights SGLang comes up without the plugin, healthy to look at."""
    damaged = {"numerics": BF16.to_dict() | {"rollout": "fp7"}}
    message = refusal(models, tmp_path, BF16, plugin=damaged)
    assert "the plugin did not load" in message
    assert "numerics.rollout: found 'fp7', expected one of bf16, fp8" in message


def test_a_hook_whose_target_is_not_there(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FP8 weights SGLang does not come up on a CPU without the plugin; what is told is why it did not load."""
    monkeypatch.setenv(PLANT, renamed_target.__name__)
    message = refusal(models, tmp_path, FP8)
    assert "the plugin did not load" in message
    assert re.search(r"sglang\.srt\.\S+_renamed: not found", message)
