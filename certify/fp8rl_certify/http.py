"""Requests to one server, with one time limit for all requests, however slowly the server answers."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from fp8rl_certify.errors import shown, user_error

# Types of what a server may say: anything else is a fault of the server, and never a value that is computed with.

_LEAST = -1e30
"""A log-probability below this number means minus infinity, which some servers write so."""
_ROUNDING = 1e-3
"""Largest log-probability that is accepted: rounding can give a nearly certain token a number above 0."""


class Said(BaseModel):
    """A JSON object from a server. Keys that have no field are ignored, and no value is coerced."""

    model_config = ConfigDict(strict=True, frozen=True)


def _logprob(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a log-probability")
    if not _LEAST <= value < math.inf:  # NaN, too
        return math.nan
    if value > _ROUNDING:
        raise ValueError("a log-probability, which is at most 0")
    return float(value)


def _first_two(value: Any) -> Any:
    return tuple(value[:2]) if isinstance(value, list) else value


Count = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenId = Count
Name = Annotated[str, Field(max_length=1000)]
Logprob = Annotated[float, BeforeValidator(_logprob)]
"""A log-probability in nats; null and numbers that are not finite become NaN."""
Scored = Annotated[tuple[Logprob, TokenId], BeforeValidator(_first_two)]
"""SGLang's `[logprob, token, text]`. The text is ignored."""

T = TypeVar("T")
LARGEST = 64 << 20
"""Largest size of an answer in bytes. The expected answers have a few MB at most."""


class Refused(Exception):
    """The server refused a request. status: the HTTP status. text: the beginning of the body."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


class ServerFailed(Exception):
    """The server closed the connection, or answered with an error of its own."""


class NoServer(Exception):
    """Nothing answers at the address."""


class TimeUp(Exception):
    """The time limit for all requests has passed."""


class Http:
    """A client of one server for a number of seconds. Threads may share it.

    Its requests run in a separate event loop, because only there a timeout holds for a whole request. The timeout of a
    blocking request starts again with each byte.
    """

    def __init__(self, url: str, api_key: str | None, seconds: float) -> None:
        self.url, self._has_key, self._ends = url, bool(api_key), time.monotonic() + seconds
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._answered = False
        self._loop = asyncio.new_event_loop()
        self._client = httpx.AsyncClient(
            base_url=url, headers=self._headers, trust_env=False, limits=httpx.Limits(), timeout=None
        )
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="certify-http")
        self._thread.start()

    def close(self) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def get(self, path: str, kind: TypeAdapter[T]) -> T:
        """Get a path, and return its JSON. Raises `Refused`, `ServerFailed`, `NoServer`, `TimeUp`."""
        return self._asked("GET", path, None, kind)

    def post(self, path: str, body: Mapping[str, Any], kind: TypeAdapter[T]) -> T:
        """Post a JSON body, and return the JSON answer. Raises `Refused`, `ServerFailed`, `NoServer`, `TimeUp`."""
        return self._asked("POST", path, body, kind)

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None, kind: TypeAdapter[T]) -> T:
        try:
            status, text = self._run(self._request(method, path, body))
        except TimeoutError:
            raise TimeUp from None
        except httpx.ConnectError as error:
            if self._answered:
                raise ServerFailed(f"{path} is not answered any more: {error}") from None
            raise NoServer(str(error)) from None
        except httpx.HTTPError as error:
            raise ServerFailed(f"{path} broke off: {_sentence(str(error)) or type(error).__name__}") from None
        self._answered = True
        if status in (401, 403):
            raise user_error(
                "--api-key",
                found=f"{'one' if self._has_key else 'none'}, which {self.url} refuses ({status})",
                expected="the key of this server",
                remedy="Give it with --api-key, or in the environment variable FP8RL_API_KEY.",
            )
        if 400 <= status < 500:
            raise Refused(status, _sentence(text.decode(errors="replace")))
        if status != 200:
            raise ServerFailed(f"{path} answered {status}: {_sentence(text.decode(errors='replace'))}")
        return _read(kind, text, path)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        """Send one request, and return the status and the body of the answer."""
        async with (
            asyncio.timeout(self._ends - time.monotonic()),
            self._client.stream(method, path, json=body) as response,
        ):
            read = bytearray()
            async for piece in response.aiter_bytes():
                read += piece
                if len(read) > LARGEST:
                    raise ServerFailed(f"{path} answered more than {LARGEST >> 20} MiB")
            return response.status_code, bytes(read)

    async def _end(self) -> None:
        """Close connections, and cancel tasks that an interrupt has left running."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.aclose()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _read(kind: TypeAdapter[T], body: bytes, path: str) -> T:
    """Parse a JSON body. Raises `ServerFailed` if the JSON does not have the expected form."""
    try:
        return kind.validate_json(body)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
    if wrong["type"] == "json_invalid":
        raise ServerFailed(f"{path} answered no JSON: {_sentence(body.decode(errors='replace'))[:80]!r}")
    key = ".".join(map(str, wrong["loc"])) or "the answer"
    expected = wrong["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    raise ServerFailed(f"{path} answered another form: {key[:80]} is {shown(wrong['input'], 60)}, expected {expected}")


def _sentence(text: str) -> str:
    """Return the beginning of a server's text, in one line without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text[:2000].split()))[:200]
