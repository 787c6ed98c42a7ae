"""A proxy in the environment, and this machine beside it."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import requests

from fp8rl.rollout.loopback import is_loopback, reach_loopback
from fp8rl.rollout.tasks.rewards.builtin import posted
from tests.rollout.tasks.rewards.test_ours import service

NOBODY = "http://127.0.0.1:9"
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
ADDED = "a.test,127.0.0.1,localhost,::1"


@pytest.fixture(params=[str.lower, str.upper], ids=["lower", "upper"])
def proxied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with a proxy that nobody serves, and without `no_proxy`."""
    for name in (*PROXIES, "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in PROXIES:
        monkeypatch.setenv(request.param(name), NOBODY)


CLIENTS: list[Callable[[str], Any]] = [
    lambda url: httpx.post(url, json={}).json(),
    lambda url: requests.post(url, json={}, timeout=20).json(),
    lambda url: float(urllib.request.urlopen(url, b"{}", timeout=20).read()),
]
"""Of users."""


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_clients_and_rewards_reach_this_machine_and_others_by_the_proxy(proxied: None, host: str) -> None:
    async def asked(url: str) -> Any:
        with pytest.raises(httpx.ConnectError):
            await posted("http://other.test/", {})
        return await posted(url, {})

    with service(lambda *_: 0.5) as url:
        own = url.replace("127.0.0.1", host)
        assert asyncio.run(asked(own)) == 0.5
        for ask in CLIENTS:
            with pytest.raises((OSError, httpx.ConnectError)):
                ask(own)
        reach_loopback()
        for ask in CLIENTS:
            assert ask(own) == 0.5
            with pytest.raises((OSError, httpx.ConnectError)):  # by the proxy
                ask("http://other.test/")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"no_proxy": "a.test"}, {}),
        ({"http_proxy": ""}, {}),
        ({"HTTPS_PROXY": "p", "NO_PROXY": "a.test, 127.0.0.1"}, dict.fromkeys(("no_proxy", "NO_PROXY"), ADDED)),
        ({"ALL_PROXY": "p", "no_proxy": "*"}, {}),
    ],
)
def test_a_list_of_the_users_is_added_to_and_nothing_is_without_a_proxy(
    before: dict[str, str], after: dict[str, str]
) -> None:
    environment = dict(before)
    for _ in range(2):
        reach_loopback(environment)
        assert environment == before | after


def test_loopback_is_known_by_its_address() -> None:
    own = ["http://127.0.0.1:3/x", "http://127.8.0.1", "http://[::1]:3", "https://localhost", "http://a.localhost:1"]
    others = ["http://10.0.0.1:3", "http://localhost.test", "http://[fe80::1]:3", "http://127.0.0.1.test"]
    assert [url for url in own + others if is_loopback(url)] == own
