"""An engine whose cache of keys and values was planted in FP8: the audit finds it, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fp8rl.diagnose.audit import differences_of
from fp8rl.diagnose.audit.observations import engine_sightings
from fp8rl.models import read_model
from fp8rl.numerics.core.memory import Holding
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rollout.engine.protocol import EngineReport, differences
from fp8rl.rollout.engine.server import arguments
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.weight_sync.served import convert_checkpoint
from tests.support.rig import MODELS, Setup, make_engine

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("warm_engines")]
SETUP = Setup("moe")


def test_an_fp8_cache_of_keys_and_values_is_found(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine that nobody asks for a handshake, which would refuse it."""
    monkeypatch.setattr(arguments, "_CPU_ARGUMENTS", (*arguments._CPU_ARGUMENTS, "--kv-cache-dtype", "fp8_e4m3"))
    report, held = asyncio.run(ask(models["moe"], tmp_path))
    sightings = engine_sightings(held, read_model(models["moe"]), SETUP.numerics)
    (difference,) = differences_of(sightings)
    assert (difference.key, difference.found, difference.planned) == ("engine.kv_cache", "e4m3", "bf16")
    layers = range(MODELS["moe"].layers)
    assert difference.names == [f"{kind} of layer {layer}" for kind in "kv" for layer in layers]
    assert difference.remedy == "Start the engine with the run's numerics.kv, which sets --kv-cache-dtype."
    (refusal,) = differences(expected_report(SETUP.numerics), report)
    assert refusal.startswith("kv_cache_dtype: found 'float8_e4m3fn', expected 'bfloat16'")

    formats = {(each.key, each.found) for each in sightings}
    assert formats == {
        ("engine.weight", "e4m3"),
        ("engine.scale", "fp32"),
        ("engine.leftover", "bf16"),
        ("engine.derived", "bf16"),
        ("engine.kv_cache", "e4m3"),
    }
    sizes = read_model(models["moe"]).sizes
    quantized = [each for each in sightings if each.key == "engine.weight"]
    assert sum(each.bytes for each in quantized) * 2 == sum(e.bytes for e in sightings if e.key == "engine.derived")
    assert len(quantized) == sizes.layers * (4 + 3 * sizes.experts)


async def ask(model: Path, folder: Path) -> tuple[EngineReport, tuple[Holding, ...]]:
    convert_checkpoint(model, folder / "served", SETUP.numerics.rollout_spec)
    engine = make_engine(folder / "engine.log", SETUP.numerics, expected=None)
    try:
        async with EngineClient(await engine.start(folder / "served")) as client:
            (held,) = await client.inventory()
            return await client.report(), held
    finally:
        await engine.stop()
