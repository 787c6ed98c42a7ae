"""Limits what a hub may send. Without limits, clients wait as long as single bytes arrive, and trust its headers."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpcore
import httpx
from huggingface_hub import set_client_factory
from huggingface_hub._tree_cache import TreeCacheEntry
from huggingface_hub.utils import _http

PATIENCE_S, LEAST_BYTES = 30.0, 32 << 10
"""Within this many seconds a request must get this many bytes, or come to its end."""
SILENCE_S, MOST_SILENCES, LONGEST_WAIT_S = 10.0, 3, 300
"""Seconds to wait for an answer if the client sets no limit; the number of unanswered waits that ends a download; and
the longest wait in seconds that a hub may demand from a client that asks too often."""
MOST_TRIES, MOST_REQUESTS, MOST_BYTES = 20, 200, 64 << 20
"""The most tries of one address; and the most requests and bytes before a repository's files are listed."""
_DIGEST = re.compile(r"[0-9a-f]{32,128}")
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubAnswerError(Exception):
    """The answer of a hub breaks the protocol, or does not end. The message continues the words "a hub that"."""


@dataclass
class Limits:
    """The bytes and requests that a download may still use."""

    size: int = MOST_BYTES
    requests: int = MOST_REQUESTS
    silences: int = 0
    tried: Counter[str] = field(default_factory=Counter)

    def expect(self, files: Collection[TreeCacheEntry]) -> None:
        """Check the listing of a repository, and raise the limits so that each file may be sent twice."""
        for file in files:
            names = [file.blob_id, *filter(None, [file.lfs_sha256])]
            if not all(isinstance(name, str) and _DIGEST.fullmatch(name) for name in names):
                raise HubAnswerError(f"names a file by {names!r:.80}, which is no digest")
        self.size += 2 * sum(file.size for file in files)
        self.requests += MOST_TRIES * len(files)

    def ask(self, request: httpx.Request) -> None:
        request.headers["accept-encoding"] = "identity"  # compressed data may become a thousand times as long
        self.requests -= 1
        self.tried[str(request.url)] += 1
        if self.requests < 0 or self.tried[str(request.url)] > MOST_TRIES:
            raise HubAnswerError("has to be asked again and again")

    def hear(self, response: httpx.Response) -> None:
        """Check the headers from which the hub's clients take names of files and times to wait."""
        headers = response.headers
        if (packed := headers.get("content-encoding", "identity")) != "identity":
            raise HubAnswerError(f"sends {packed!r:.40}, which it was asked not to")
        if (found := headers.get("x-repo-commit")) is not None and not COMMIT.fullmatch(found):
            raise HubAnswerError(f"names a commit by {found!r:.80}, expected 40 hexadecimal digits")
        found = headers.get("x-linked-etag") or headers.get("etag")
        if "x-repo-commit" in headers and found and not _DIGEST.fullmatch(found.removeprefix("W/").strip('"')):
            raise HubAnswerError(f"names a file by {found!r:.80}, expected hexadecimal digits")
        waits = re.findall(r"\d+", " ".join(headers.get(name, "") for name in ("retry-after", "ratelimit")))
        if response.status_code in (429, 503) and any(int(number[:9]) > LONGEST_WAIT_S for number in waits):
            raise HubAnswerError(f"answers {response.status_code}, and asks to wait for a long time")


class _Stream:
    """A connection with limits on how long a hub may be silent or slow. Each `write` begins a new request."""

    def __init__(self, stream: httpcore.NetworkStream, limits: Limits) -> None:
        self._stream, self._limits = stream, limits
        self._waited, self._got = 0.0, 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        began = time.monotonic()
        try:
            data = self._stream.read(max_bytes, timeout or SILENCE_S)
        except httpcore.ReadTimeout:
            self._limits.silences += 1
            if self._limits.silences < MOST_SILENCES:
                raise
            raise HubAnswerError(f"did not answer {MOST_SILENCES} times") from None
        self._waited += time.monotonic() - began
        self._got += len(data)
        self._limits.size -= len(data)
        if self._limits.size < 0:
            raise HubAnswerError("sends more than it lists")
        if self._waited > PATIENCE_S:
            if self._got < LEAST_BYTES:
                raise HubAnswerError(f"sends {self._got} bytes in {PATIENCE_S:g} s")
            self._waited, self._got = 0.0, 0
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._waited, self._got = 0.0, 0
        self._stream.write(buffer, timeout)

    def start_tls(self, *arguments: Any, **named: Any) -> Any:
        return _Stream(self._stream.start_tls(*arguments, **named), self._limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Network(httpcore.SyncBackend):
    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def connect_tcp(self, *arguments: Any, **named: Any) -> Any:
        named["timeout"] = named.get("timeout") or SILENCE_S
        return _Stream(super().connect_tcp(*arguments, **named), self._limits)


@contextmanager
def limited() -> Iterator[Limits]:
    """Apply limits to the hub's clients inside the block, and yield the limits."""
    limits, former = Limits(), _http._GLOBAL_CLIENT_FACTORY

    def client() -> httpx.Client:
        made = former()
        for transport in (made._transport, *made._mounts.values()):
            if isinstance(transport, httpx.HTTPTransport):
                transport._pool._network_backend = _Network(limits)
        made.event_hooks["request"].append(limits.ask)
        made.event_hooks["response"].append(limits.hear)
        return made

    set_client_factory(client)
    try:
        yield limits
    finally:
        set_client_factory(former)
