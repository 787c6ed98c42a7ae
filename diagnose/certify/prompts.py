"""What a server is asked: prompts that it has never seen, of many lengths."""

from __future__ import annotations

import random

from fp8rl.diagnose.certify.api import Prompt, Server
from fp8rl.diagnose.certify.http import Refused

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
        """So many token ids."""
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
