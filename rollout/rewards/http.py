"""The reward `http`: whatever a service says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import httpx

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()


async def http(
    question: str, answer: str, reference: str, fields: Mapping[str, Any], finished: bool, tokens: int, url: str
) -> Any:
    """What the service at `url` answers to a POST of all of this as JSON: a number, or named numbers.

    Raises:
        httpx.HTTPError: it does not answer, or with a status that is no success.
    """
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=256))
    asked: dict[str, Any] = {"question": question, "answer": answer, "reference": reference, "fields": fields}
    asked |= {"finished": finished, "tokens": tokens}
    response = await _clients[loop].post(url, json=asked)
    response.raise_for_status()
    return response.json()
