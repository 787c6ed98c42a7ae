"""A time limit for the headers of a request, which uvicorn 0.54 has not: who opens a connection and sends nothing, or a
byte now and then, would hold it for ever."""

from __future__ import annotations

import asyncio
from typing import Any

HEADERS_S = 30.0
"""Seconds that a connection may be open without a request, and between an answer and the next request."""


def limit_headers(seconds: float = HEADERS_S) -> None:
    """Have the HTTP servers of this process that start from now on close such connections."""
    from uvicorn.protocols.http import auto

    auto.AutoHTTPProtocol = limited(auto.AutoHTTPProtocol, seconds)


def limited(protocol: type[Any], seconds: float) -> type[Any]:
    """Return uvicorn's HTTP protocol with the limit. Its `cycle` is the last request whose headers were whole."""

    class Limited(protocol):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._look_later()

        def _look_later(self) -> None:
            asyncio.get_running_loop().call_later(seconds, self._look, self.cycle)

        def _look(self, before: Any) -> None:
            """Close the connection if it has had no request since the last look."""
            if self.transport.is_closing():
                return
            if self.cycle is before and (before is None or before.response_complete):
                self.transport.close()
            else:
                self._look_later()

    return Limited
