"""The models, and the rig that neighbouring tests share. It is closed before a test that does not ask for it: such a
test may start Ray itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rig import Models, Rig

RIG: pytest.StashKey[Rig] = pytest.StashKey()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = request.config.stash[RIG] = Rig(tmp_path_factory.mktemp("rig"), models)
    yield rig
    rig.close()


@pytest.fixture
def stacks(rig: Rig) -> None:
    """Stacks of this process are on the rig's Ray."""
    rig.only_ray()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if RIG in item.config.stash and "rig" not in getattr(nextitem, "fixturenames", ()):
        item.config.stash[RIG].close()
