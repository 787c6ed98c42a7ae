"""Connections to the recording endpoint that send no request."""

import asyncio

import pytest

from fp8rl.rollout.environments.harness import endpoint as module
from fp8rl.rollout.environments.harness.endpoint import ProgramEndpoint

LIMIT = 0.3
WHOLE = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"", WHOLE])
def test_headers_that_drip_end_the_connection(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEADERS_S", LIMIT)

    async def dripped() -> float:
        endpoint = ProgramEndpoint(None, ())
        await endpoint.open()
        port = int(endpoint.url.rpartition(":")[2].removesuffix("/v1"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if first:
            writer.write(first)
            assert b"401" in await reader.readline()
            await reader.readuntil(b"}}")
        begun = asyncio.get_running_loop().time()
        for drip in b"GET / HTTP/1.1\r\nX: " + b"x" * 100:
            writer.write(bytes([drip]))
            try:
                if await asyncio.wait_for(reader.read(1), 0.05) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            raise AssertionError("the connection goes on")
        writer.close()
        await endpoint.close()
        return asyncio.get_running_loop().time() - begun

    assert asyncio.run(dripped()) > LIMIT / 2
