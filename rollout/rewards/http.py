"""The reward `http`: whatever a service says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from fp8rl.rollout.loopback import is_loopback

_IDLE_S = 1.0
"""Seconds for which an idle connection is kept: services close theirs after 5 s or so, and a question that is asked
at that moment would be lost."""
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, httpx.AsyncClient]] = WeakKeyDictionary()
"""Two clients for each loop: one that goes by the environment's proxies, and one that does not."""


async def http(
    question: str,
    answer: str,
    reference: str,
    fields: Mapping[str, Any],
    finished: bool,
    tokens: int,
    turns: Sequence[Any],
    outcome: Mapping[str, float],
    url: str,
) -> Any:
    """What the service at `url` answers to a POST of all of this as JSON: a number, or named numbers.

    Raises:
        httpx.HTTPError: it does not answer, or with a status that is no success.
    """
    asked = {"question": question, "answer": answer, "reference": reference, "fields": fields}
    more = {"finished": finished, "tokens": tokens, "turns": turns, "outcome": outcome}
    return await posted(url, asked | more)


async def posted(url: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    """What a service answers to a POST; both are JSON. Raises httpx.HTTPError, as `http` does."""
    clients, proxied = _clients.setdefault(asyncio.get_running_loop(), {}), not is_loopback(url)
    if proxied not in clients:
        limits = httpx.Limits(max_connections=256, keepalive_expiry=_IDLE_S)
        clients[proxied] = httpx.AsyncClient(timeout=None, limits=limits, trust_env=proxied)
    response = await clients[proxied].post(url, json=body, headers=headers)
    response.raise_for_status()
    return response.json()
