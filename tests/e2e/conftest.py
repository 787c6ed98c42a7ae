"""Ray, the models and the rig. Nothing outlives the module that asked for it: other tests start Ray themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.support.rig import Rig, write_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def rig(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        address="local",
        _node_ip_address="127.0.0.1",
    )
    rig = Rig(tmp_path_factory.mktemp("rig"), models)
    try:
        yield rig
    finally:
        rig.close()
        ray.shutdown()
