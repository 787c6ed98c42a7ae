"""A connection without a request is closed, one with a request is not."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fp8rl.rollout.engine.server.public import limit_headers, limited

LIMIT = 0.3
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers after twice the limit."""
    import asyncio

    if scope["type"] == "http":
        await asyncio.sleep(2 * LIMIT)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def port() -> Iterator[int]:
    server = uvicorn.Server(
        uvicorn.Config(slow, port=0, http=limited(H11Protocol, LIMIT), log_level="error", timeout_keep_alive=60)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def closed_after(connection: socket.socket, drips: bytes) -> bool:
    """Whether the other side closes it while it is sent a byte now and then."""
    connection.settimeout(0.05)
    for drip in drips:
        try:
            connection.sendall(bytes([drip]))
            if connection.recv(100) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"", WHOLE])
def test_headers_that_drip_end_the_connection_and_a_slow_answer_does_not(port: int, first: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        if first:
            connection.sendall(first)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert closed_after(connection, b"GET / HTTP/1.1\r\nX: " + b"x" * 1000)


def test_servers_that_start_later_have_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvicorn.protocols.http.auto.AutoHTTPProtocol", H11Protocol)
    limit_headers(LIMIT)
    config = uvicorn.Config(slow)
    config.load()
    assert issubclass(config.http_protocol_class, H11Protocol) and config.http_protocol_class is not H11Protocol
