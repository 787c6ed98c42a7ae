"""A tiny model, and one stock SGLang server for all tests that only talk to a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8rl.rollout.engine.engine import Engine
from tests.support.servers import group_members, shared_memory, small_config
from tests.support.tiny_model import TinyModel, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BF16 Qwen3-MoE of one layer."""
    return _make_model(tmp_path_factory.mktemp("tiny_model"), seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return _make_model(tmp_path_factory.mktemp("other_model"), seed=1)


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Started in a directory that would break it if it imported from there."""
    folder = tmp_path_factory.mktemp("server")
    for module in ("random", "fp8rl", "sglang"):
        (folder / f"{module}.py").write_text("raise RuntimeError('of the current directory')")
    engine = Engine(small_config(), folder / "engine.log")
    with asyncio.Runner() as runner:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            runner.run(engine.start(tiny_model, 3))
        pid = engine.pid
        traces = [engine._scratch, *shared_memory(group_members(pid))]
        yield engine
        began = time.monotonic()
        runner.run(engine.stop())
        runner.run(engine.stop())
        assert time.monotonic() - began < 15
    assert group_members(pid) == [] and not any(path.exists() for path in traces), "it leaves nothing"


def _make_model(folder: Path, seed: int) -> Path:
    write_tiny_model(folder / "model", TinyModel(layers=1, experts=4, max_positions=512), seed)
    return folder / "model"
