"""Requests to a server, whichever API it speaks: prompts that it has never seen, and answers with the log-probability
of each token.

Two APIs are known, SGLang's own and OpenAI's completions (`apis`). Here is what both share: a request that is bounded
in time, and what may come of it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from pydantic import TypeAdapter

from fp8rl_certify.errors import UserError, shown, user_error
from fp8rl_certify.http import Count, Http, Name, Refused, Said, ServerFailed

Prompt = str | list[int]
OTHERS = 5
"""Most probable tokens whose log-probabilities are compared beside each token's own."""


@dataclass(frozen=True)
class Answer:
    """A server's answer to one prompt."""

    tokens: tuple[int | str, ...]
    """Ids, or texts where a server gives no ids."""
    logprobs: tuple[float, ...]
    """Of each, in nats; NaN where there is none."""
    others: tuple[tuple[float, ...], ...] = ()
    """Log-probabilities of the most probable tokens beside each, the largest first; none where not given."""
    cached: int | None = None
    """Tokens of the prompt that came from a cache; None: the server does not say."""
    scored: tuple[float, ...] | None = None
    """Log-probabilities of the prompt's tokens from the second on, if asked for."""


class Server(ABC):
    """One server and how it is asked."""

    api: ClassVar[str]
    lists: bool = True
    """It takes several prompts in one request, at the same time; else they are sent as requests at the same time."""
    takes_ids: bool = True
    """Prompts may be token ids; else they are text."""
    context: int | None = None
    """Tokens of prompt and answer; None: not known."""
    isolates: bool = False
    """Prompts under another salt share no cached prefix, and the server proves it by what it says of its cache."""
    caches: bool | None = None
    """It was seen to reuse a prefix; None: it does not say."""
    chunk: int | None = None
    """Tokens that it prefills at once; None: it does not say."""

    def __init__(self, http: Http, model: str) -> None:
        """model: as the server calls it."""
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


class Meta(Said):
    """The facts that llama.cpp gives of a model."""

    n_ctx: Count | None = None


class Listed(Said):
    """A model that a server lists. vLLM and SGLang say its context in `max_model_len`, llama.cpp in `meta`."""

    id: Name
    max_model_len: Count | None = None
    meta: Meta | None = None

    @property
    def context(self) -> int | None:
        return self.max_model_len or (self.meta.n_ctx if self.meta else None) or None


class Listing(Said):
    """The answer of `/v1/models`."""

    data: list[Listed]


_LISTING = TypeAdapter(Listing)


def models(http: Http) -> list[Listed] | None:
    """The models of `/v1/models`; None if there is no such list."""
    try:
        return http.get("/v1/models", _LISTING).data
    except (Refused, ServerFailed):
        return None


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
        expected=f"one of this server's: {', '.join(shown(name)[1:-1] for name in served[:20]) or 'it has none'}",
        remedy="Name one of them.",
    )


def no_logprobs(found: str, remedy: str) -> UserError:
    """The error for a server whose answers cannot be compared."""
    return user_error("--server", found=found, expected="a log-probability for each token of an answer", remedy=remedy)


def fitting(answer: Answer, tokens: int, path: str) -> Answer:
    """The answer, if it has a log-probability for each of its tokens, and no more of these than were asked for.

    Raises:
        ServerFailed: it has not.
    """
    said, logprobs = len(answer.tokens), len(answer.logprobs)
    if said != logprobs or said > tokens:
        raise ServerFailed(
            f"{path} answered {said} tokens and {logprobs} log-probabilities where {tokens} were asked for"
        )
    return answer


# What a server is asked: prompts that it has never seen, of many lengths.

IDS = range(8, 64)
"""Token ids of prompts: every vocabulary has them, and most have their special tokens elsewhere."""
SHORT = (5, 12, 17, 33, 64, 97, 130, 200)
"""Tokens of the prompts that are asked in every way; few of them are multiples of a tile or a page."""
FIRST = 4
"""One of so many short prompts is asked in every way before the others are: a short limit has a verdict then."""
LONG_PROMPTS = 2
"""Asked at the same time in each of the two rounds; one more is asked with its beginning in the cache."""
LONGEST = 4096
"""Tokens of the longest prompts, where a server does not say how many it prefills at once."""
SHORTEST_LONG = 300
ROOM = 64
"""Tokens that are left to answers in the context of a server."""


class Writer:
    """Writes prompts that are drawn anew in each run, so that no cache holds them.

    Dozens in a row begin with different tokens, so that none has its beginning from its neighbour's.
    """

    def __init__(self, server: Server, seed: int | None = None) -> None:
        """seed: None draws one."""
        self._draw, self._server = random.Random(seed), server
        self._first = self._draw.randrange(len(IDS))

    def prompt(self, ids: list[int]) -> Prompt:
        """Ids as the server takes them; one that takes none is asked with a row of numbers, of more tokens."""
        return ids if self._server.takes_ids else " ".join(map(str, ids))

    def ids(self, tokens: int) -> list[int]:
        """Draw so many token ids. Each prompt begins with another one, so that no two share a prefix."""
        self._first += 1
        return [IDS[self._first % len(IDS)], *self._draw.choices(IDS, k=tokens - 1)] if tokens > 0 else []

    def short(self) -> list[list[int]]:
        """Rows of the lengths of SHORT."""
        room = max(1, (self._server.context or 1 << 20) - ROOM)
        return [self.ids(min(length, room)) for length in SHORT]

    def long(self) -> list[list[int]]:
        """Rows as long as three chunks, or as LONGEST, if the server's context has the room. None if it has none.

        Raises:
            ServerFailed, TimeUp.
        """
        server = self._server
        length = 3 * server.chunk + 100 if server.chunk else LONGEST
        length = min(length, (server.context or length + ROOM) - ROOM)
        while length >= SHORTEST_LONG and not self._is_taken(length):
            length //= 2
        return [self.ids(length - 17 * number) for number in range(1 + LONG_PROMPTS) if length >= SHORTEST_LONG]

    def _is_taken(self, tokens: int) -> bool:
        try:
            self._server.ask([self.prompt(self.ids(tokens))], 1, "fp8rl-certify-length")
        except Refused:
            return False
        return True
