"""Requests to a server: prompts that it has never seen, and answers with the log-probability of each token.

There are two APIs, SGLang's own and OpenAI's completions (`apis`). This file has the parts that they share: the
interface of a server, its answers and errors, and the prompts.
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
"""Number of most probable tokens whose log-probabilities are compared in addition to each token's own."""


@dataclass(frozen=True)
class Answer:
    """A server's answer to one prompt."""

    tokens: tuple[int | str, ...]
    """Ids of the answer's tokens, or their texts if the server gives no ids."""
    logprobs: tuple[float, ...]
    """Log-probability of each token in nats; NaN where the server gives none."""
    others: tuple[tuple[float, ...], ...] = ()
    """For each token, log-probabilities of the most probable tokens at its place, largest first; () if not given."""
    cached: int | None = None
    """Number of the prompt's tokens that came from a cache; None: the server does not say."""
    scored: tuple[float, ...] | None = None
    """Log-probabilities of the prompt's tokens from the second on, if asked for."""


class Server(ABC):
    """One server, and how to send it requests."""

    api: ClassVar[str]
    lists: bool = True
    """Whether the server takes several prompts in one request. If not, they are sent as simultaneous requests."""
    takes_ids: bool = True
    """Whether prompts may be token ids. If not, they are text."""
    context: int | None = None
    """Largest number of tokens of prompt and answer together; None: not known."""
    isolates: bool = False
    """Whether prompts with different salts share no cached prefix, as the server's counts of cached tokens prove."""
    caches: bool | None = None
    """Whether the server was seen to reuse a cached prefix; None: the server does not say."""
    chunk: int | None = None
    """Number of tokens that the server prefills at once; None: the server does not say."""

    def __init__(self, http: Http, model: str) -> None:
        """model: the server's name of the model."""
        self.http, self.model = http, model

    @abstractmethod
    def ask(self, prompts: Sequence[Prompt], tokens: int, salt: str, *, temperature: float = 0.0) -> list[Answer]:
        """Send one request for an answer of `tokens` tokens to each prompt. Answers are greedy at temperature 0.

        Raises:
            Refused, ServerFailed, TimeUp.
            UserError: the server gives no log-probabilities.
        """

    @abstractmethod
    def score(self, prompts: Sequence[list[int]], salt: str) -> list[Answer] | None:
        """Return answers with the log-probabilities of the prompts' tokens; None if the server does not give them."""

    def alone(self, prompts: Sequence[Prompt], tokens: int, salt: str) -> list[Answer]:
        """Ask for an answer to each prompt by itself, one after the other. Prompts have salts of their own."""
        return [self.ask([prompt], tokens, f"{salt}-{number}")[0] for number, prompt in enumerate(prompts)]

    def together(self, prompts: Sequence[Prompt], tokens: int, salt: str, *, temperature: float = 0.0) -> list[Answer]:
        """Ask for answers to all prompts at the same time."""
        if self.lists:
            return self.ask(prompts, tokens, salt, temperature=temperature)
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = pool.map(lambda prompt: self.ask([prompt], tokens, salt, temperature=temperature)[0], prompts)
            return list(asked)

    def look_at_cache(self, prompt: Prompt) -> None:
        """Find out whether the server reuses prefixes, reports it, and keeps the prefixes of different salts apart.

        prompt: a prompt that is new to the server, and long enough to be cached.
        """
        salts = "fp8rl-certify-a", "fp8rl-certify-a", "fp8rl-certify-b"
        first, second, other = (self.ask([prompt], 1, salt)[0].cached for salt in salts)
        if second is not None:  # some say nothing of a cache that gave nothing
            self.caches = second > (first or 0)
            self.isolates = self.caches and not other


class Meta(Said):
    """The facts that llama.cpp gives about a model."""

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
    """Return the models that `/v1/models` lists; None if the server has no such list."""
    try:
        return http.get("/v1/models", _LISTING).data
    except (Refused, ServerFailed):
        return None


def named(asked: str | None, served: Sequence[str]) -> str:
    """Return the name of the model to ask: the model that the user names, or the server's only model.

    Raises:
        UserError: the server has not the named model, or it has several models and the user names none.
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
    """Return the error for a server whose answers have no log-probabilities and so cannot be compared."""
    return user_error("--server", found=found, expected="a log-probability for each token of an answer", remedy=remedy)


def fitting(answer: Answer, tokens: int, path: str) -> Answer:
    """Return the answer after a check: it has one log-probability per token, and at most `tokens` tokens.

    Raises:
        ServerFailed: the check fails.
    """
    said, logprobs = len(answer.tokens), len(answer.logprobs)
    if said != logprobs or said > tokens:
        raise ServerFailed(
            f"{path} answered {said} tokens and {logprobs} log-probabilities where {tokens} were asked for"
        )
    return answer


# What a server is asked: prompts that it has never seen, of many lengths.

IDS = range(8, 64)
"""Token ids of prompts. Every vocabulary has these ids, and in most vocabularies none of them is a special token."""
SHORT = (5, 12, 17, 33, 64, 97, 130, 200)
"""Lengths in tokens of the prompts that are asked in every way. Few are multiples of a tile or a page."""
FIRST = 4
"""One of every FIRST short prompts goes through all ways first, so that a short time limit gives a verdict too."""
LONG_PROMPTS = 2
"""Number of long prompts that are asked at the same time. One more is asked with its beginning in the cache."""
LONGEST = 4096
"""Length in tokens of the long prompts, if a server does not say how many tokens it prefills at once."""
SHORTEST_LONG = 300
ROOM = 64
"""Number of tokens that prompts leave free for answers in a server's context."""


class Writer:
    """Draws new prompts in each run, so that no cache holds them.

    Dozens of successive prompts begin with different tokens, so that they share no prefix.
    """

    def __init__(self, server: Server, seed: int | None = None) -> None:
        """seed: None for a random seed."""
        self._draw, self._server = random.Random(seed), server
        self._first = self._draw.randrange(len(IDS))

    def prompt(self, ids: list[int]) -> Prompt:
        """Return ids in the form that the server takes: ids, or a text of numbers, which has more tokens."""
        return ids if self._server.takes_ids else " ".join(map(str, ids))

    def ids(self, tokens: int) -> list[int]:
        """Draw `tokens` token ids. Successive prompts begin with different ids, so that they share no prefix."""
        self._first += 1
        return [IDS[self._first % len(IDS)], *self._draw.choices(IDS, k=tokens - 1)] if tokens > 0 else []

    def short(self) -> list[list[int]]:
        """Return rows of ids with the lengths in SHORT."""
        room = max(1, (self._server.context or 1 << 20) - ROOM)
        return [self.ids(min(length, room)) for length in SHORT]

    def long(self) -> list[list[int]]:
        """Return rows of three chunks or LONGEST tokens, or shorter ones if the server's context is smaller. Return an
        empty list if the server takes no long prompt.

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
