"""What a server is asked, whichever API it speaks: answers to prompts, with the log-probability of each token.

Two APIs are known, a file each: SGLang's own (`sglang_api`) and OpenAI's completions (`openai_api`). Here is what both
share: a request that is bounded in time, and what may come of it.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

from numerics.errors import UserError, user_error

Prompt = str | list[int]
OTHERS = 5
"""Most probable tokens whose log-probabilities are compared beside each token's own."""


@dataclass(frozen=True)
class Answer:
    """What a server said to one prompt.

    tokens: ids, or texts where a server gives no ids. logprobs: of each, in nats; NaN where there is none.
    others: the log-probabilities of the most probable tokens beside each, the largest first; none where not given.
    cached: tokens of the prompt that came from a cache; None where the server does not say.
    scored: log-probabilities of the prompt's tokens from
    the second on, if asked for.
    """

    tokens: tuple[int | str, ...]
    logprobs: tuple[float, ...]
    others: tuple[tuple[float, ...], ...] = ()
    cached: int | None = None
    scored: tuple[float, ...] | None = None


class Refused(Exception):
    """The server refused a request. status: of HTTP. text: its body, the beginning of it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


class ServerFailed(Exception):
    """The server broke off, or answered with a fault of its own."""


class TimeUp(Exception):
    """The time for all requests is over."""


class Http:
    """Requests to one server, all of them before one point in time."""

    def __init__(self, url: str, api_key: str | None, seconds: float) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url, self._ends = url, time.monotonic() + seconds
        self._client = httpx.Client(base_url=url, headers=headers, trust_env=False, limits=httpx.Limits())

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        """The JSON at a path. Raises `Refused`, `ServerFailed`, `TimeUp`."""
        return self._json("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a JSON body. Raises `Refused`, `ServerFailed`, `TimeUp`."""
        return self._json("POST", path, body)

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeUp
        try:
            response = self._client.request(method, path, json=body, timeout=httpx.Timeout(left, connect=min(left, 5)))
        except httpx.ConnectError:
            raise
        except httpx.TimeoutException:
            raise TimeUp from None
        except httpx.HTTPError as error:
            raise ServerFailed(f"{path} broke off: {error or type(error).__name__}") from None
        if response.status_code in (401, 403):
            raise user_error(
                "--api-key",
                found=f"{'one' if 'Authorization' in self._client.headers else 'none'}, which {self.url} refuses "
                f"({response.status_code})",
                expected="the key of this server",
                remedy="Give it with --api-key, or in the environment variable FP8RL_API_KEY.",
            )
        if 400 <= response.status_code < 500:
            raise Refused(response.status_code, response.text[:300])
        if response.status_code != 200:
            raise ServerFailed(f"{path} answered {response.status_code}: {response.text[:300]}")
        try:
            return response.json()
        except ValueError:
            raise ServerFailed(f"{path} answered no JSON: {response.text[:100]!r}") from None


class Server(ABC):
    """One server and how it is asked.

    Attributes:
        model: how the server calls it.
        lists: it takes several prompts in one request, which it then has at the same time; else they are sent as
            requests at the same time.
        takes_ids: prompts may be token ids; else they are text. context: tokens of prompt and answer; None: not known.
        isolates: prompts under another salt share no cached prefix, and the server proves it by what it says of its
            cache. caches: it was seen to reuse a prefix; None: it does not say.
        chunk: tokens that it prefills at once; None: it does not say.
    """

    api: ClassVar[str]
    lists: bool = True
    takes_ids: bool = True
    context: int | None = None
    isolates: bool = False
    caches: bool | None = None
    chunk: int | None = None

    def __init__(self, http: Http, model: str) -> None:
        self.http, self.model = http, model

    @abstractmethod
    def ask(self, prompts: Sequence[Prompt], tokens: int, salt: str, *, temperature: float = 0.0) -> list[Answer]:
        """One request: an answer of `tokens` tokens to each prompt. Greedy, unless a temperature says otherwise.

        Raises:
            Refused, ServerFailed, TimeUp.
            UserError: it gives no log-probabilities.
        """

    @abstractmethod
    def score(self, prompts: Sequence[list[int]], salt: str) -> list[Answer] | None:
        """Log-probabilities of the tokens of given prompts; None where the server does not say them."""

    def alone(self, prompts: Sequence[Prompt], tokens: int, salt: str) -> list[Answer]:
        """Each prompt by itself, one after the other; what is cached of one is no other's beginning."""
        return [self.ask([prompt], tokens, f"{salt}-{number}")[0] for number, prompt in enumerate(prompts)]

    def together(self, prompts: Sequence[Prompt], tokens: int, salt: str, *, temperature: float = 0.0) -> list[Answer]:
        """All prompts at the same time."""
        if self.lists:
            return self.ask(prompts, tokens, salt, temperature=temperature)
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = pool.map(lambda prompt: self.ask([prompt], tokens, salt, temperature=temperature)[0], prompts)
            return list(asked)

    def look_at_cache(self, prompt: Prompt) -> None:
        """Find out whether the server reuses prefixes, says so, and keeps those of one salt apart from another's.

        prompt: new to the server, and long enough to be cached.
        """
        salts = "fp8rl-certify-a", "fp8rl-certify-a", "fp8rl-certify-b"
        first, second, other = (self.ask([prompt], 1, salt)[0].cached for salt in salts)
        if second is not None:  # some say nothing of a cache that gave nothing
            self.caches = second > (first or 0)
            self.isolates = self.caches and not other


def models(http: Http) -> list[dict[str, Any]] | None:
    """What `/v1/models` lists, by `id`; None if there is no such list."""
    try:
        listed = http.get("/v1/models")
    except (Refused, ServerFailed):
        return None
    rows = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and isinstance(row.get("id"), str) for row in rows):
        return None
    return rows


def named(asked: str | None, served: Sequence[str]) -> str:
    """The model of a server that is asked for; its only one if none is named.

    Raises:
        UserError: it has another, or several and none is named.
    """
    if asked in served:
        return str(asked)
    if asked is None and len(served) == 1:
        return served[0]
    raise user_error(
        "--model",
        found=asked or "none",
        expected=f"one of this server's: {', '.join(served[:20]) or 'it has none'}",
        remedy="Name one of them.",
    )


def no_logprobs(found: str, remedy: str) -> UserError:
    """The error for a server whose answers cannot be compared."""
    return user_error("--server", found=found, expected="a log-probability for each token of an answer", remedy=remedy)


def number(value: Any) -> float:
    """A log-probability as JSON has it; null, for one that is not finite, is NaN."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
