"""The ways in which a server is asked for the same answers, and the result of each way.

Answers are greedy, so that they are a function of the model and the prompt. The reference is each answer asked for
alone, while the server does nothing else. Each other way changes one thing: the rest of the batch, the part of the
prompt that comes from the cache, the chunks of a long prompt, or the server's load. A server in which a row depends
only on itself gives the same tokens with the same log-probabilities in all ways, bit for bit. A few prompts go through
all ways first, and the other prompts after them, so that a short time limit leaves no way untried.

If prompts with different salts share no cached prefix, and the server reports it, each way begins with an empty cache.
Otherwise a prompt that was asked for once always comes from the cache, and the reference is its second answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Literal

from fp8rl_certify import api as lengths
from fp8rl_certify.api import SHORTEST_LONG, Answer, Prompt, Server, Writer
from fp8rl_certify.compare import Comparison, compare
from fp8rl_certify.errors import UserError
from fp8rl_certify.http import Refused, ServerFailed, TimeUp

TOKENS = 24
"""Length of each answer in tokens."""
BATCHES = (2, 8, 32)
"""Numbers of answers that are asked for at the same time."""
LOAD, LOAD_TOKENS = 24, 96
"""The load: number of answers that are sampled at the same time, and their length in tokens."""

NO_IDS = "the server gives no token ids to go on from"
TIME_OVER = "the time was over"
NO_CACHE = "the server took nothing from a cache"

Cause = Literal["repetition", "cached prefix", "batch", "prefill", "chunked prefill", "load"]


@dataclass(frozen=True)
class ProbeResult:
    """The outcome of asking for the same answers in another way, such as in a larger batch."""

    name: str
    cause: Cause
    """The cause of a difference in this way, if there is one."""
    outcome: Literal["equal", "differs", "absent", "not reached"]
    """`absent`: this server does not have this way, or it cannot be asked for. `not reached`: it was not completed."""
    found: Comparison | None = None
    why: str = ""
    """The reason for an outcome without a comparison."""
    cached: int | None = None
    """Number of the prompts' tokens that came from the cache; None: the server does not say."""


class Probe:
    """Asks one server for the same answers in every way."""

    def __init__(self, server: Server, writer: Writer, say: Callable[[str], None]) -> None:
        self._server, self._writer, self._say = server, writer, say
        self._salts = (f"fp8rl-certify-{number}" for number in count())
        self._broken: set[Cause] = set()
        self._asked: dict[str, tuple[list[Answer], list[Answer]]] = {}
        self._found: dict[str, ProbeResult] = {}

    def ways(self) -> Iterator[ProbeResult]:
        """Yield the result of each way for a few prompts, then of each way again for all prompts. Raises what
        `Server.ask` raises for the references."""
        rows = self._writer.short()
        few = rows[lengths.FIRST - 1 :: lengths.FIRST] or rows[:1]
        self._few = len(few)
        yield from self._recorded(few)
        try:
            yield from self._recorded([row for row in rows if row not in few])
        except TimeUp:
            yield from [self._cut(way) for way in self._found.values()]

    def _recorded(self, rows: Sequence[list[int]]) -> Iterator[ProbeResult]:
        for way in self._ways(rows) if rows else ():
            before = self._found.get(way.name)
            # What differed for some prompts stays found, whatever ends the way for the others.
            cut = way.why == TIME_OVER or (before is not None and before.outcome == "differs")
            if before is not None and before.found is not None and way.found is None and cut:
                way = replace(before, why=way.why)
            self._found[way.name] = way
            if way.outcome == "differs":
                self._broken.add(way.cause)
            yield way

    def _cut(self, way: ProbeResult) -> ProbeResult:
        """Return the result of a way when time is over. If only a few prompts were asked, note it as the reason."""
        return way if way.found is None or way.found.answers > self._few else replace(way, why=TIME_OVER)

    def _ways(self, rows: Sequence[list[int]]) -> Iterator[ProbeResult]:
        server, salt = self._server, next(self._salts)
        prompts = [self._writer.prompt(row) for row in rows]
        self._say(f"asking for {len(prompts)} answers, each alone")
        first = server.alone(prompts, TOKENS, salt)
        again = server.alone(prompts, TOKENS, salt)
        reference = first if server.isolates else again
        yield self._way("alone, once more", "repetition", reference, lambda: self._alone(prompts, salt))
        yield self._cached("its own prompt cached", first, lambda: again)
        yield self._continued(rows, first, salt)
        yield self._shared(rows)
        for size in BATCHES:
            ask = partial(self._batches, prompts, size, salt)
            yield self._way(f"in batches of {size}", "batch", reference, ask)
        yield from self._scored(rows, reference)
        with self._load():
            busy = self._cause("load", "batch")
            yield self._way("while others are sampled", busy, reference, lambda: self._alone(prompts, salt))
        yield self._way("alone, after the load", "load", reference, lambda: self._alone(prompts, salt))
        yield from self._long()

    def _cause(self, cause: Cause, *simpler: Cause) -> Cause:
        """Return the cause of a difference: a simpler cause if it alone has made a difference already, else `cause`."""
        if not self._server.isolates:  # a prompt may come from the cache, and the reference not, or the other way round
            simpler = (*simpler, "cached prefix")
        return next((each for each in simpler if each in self._broken), cause)

    def _alone(self, prompts: Sequence[Prompt], same: str) -> list[Answer]:
        return self._server.alone(prompts, TOKENS, self._salt(same))

    def _salt(self, same: str) -> str:
        """Return a new salt, for which the cache is empty; if the server does not isolate salts, return `same`."""
        return next(self._salts) if self._server.isolates else same

    def _way(
        self, name: str, cause: Cause, reference: Sequence[Answer], ask: Callable[[], Sequence[Answer]]
    ) -> ProbeResult:
        self._say(name)
        try:
            answers = ask()
        except TimeUp:
            return ProbeResult(name, cause, "not reached", why=TIME_OVER)
        except (Refused, ServerFailed) as error:
            return ProbeResult(name, cause, "not reached", why=f"the server did not answer: {error}")
        references, asked = self._asked.setdefault(name, ([], []))
        references += reference
        asked += answers
        found = compare(references, asked)
        said = [answer.cached for answer in asked if answer.cached is not None]
        return ProbeResult(
            name, cause, "equal" if found.equal else "differs", found, cached=sum(said) if said else None
        )

    def _cached(self, name: str, reference: Sequence[Answer], ask: Callable[[], Sequence[Answer]]) -> ProbeResult:
        """Try a way in which prompts come from the cache. It is absent if the server has no cache."""
        way = self._way(name, "cached prefix", reference, ask)
        nothing = self._server.caches is False or (self._server.caches and not way.cached)
        return replace(way, outcome="absent", found=None, why=NO_CACHE) if nothing and way.outcome == "equal" else way

    def _continued(self, rows: Sequence[list[int]], first: Sequence[Answer], salt: str) -> ProbeResult:
        """Ask for the second half of each answer, after the prompt and the first half, which decoding has cached."""
        name, half = "continued in the middle", TOKENS // 2
        if not all(_has_ids(answer) for answer in first):
            return ProbeResult(name, "cached prefix", "absent", why=NO_IDS)
        rest = [Answer(answer.tokens[half:], answer.logprobs[half:]) for answer in first]
        longer = [_joined(row, answer.tokens[:half]) for row, answer in zip(rows, first, strict=True)]
        return self._cached(name, rest, lambda: self._server.alone(longer, TOKENS - half, salt))

    def _shared(self, rows: Sequence[list[int]]) -> ProbeResult:
        """Ask for answers to prompts whose first two thirds were in another prompt before."""
        name, salt, writer = "another prompt's beginning cached", next(self._salts), self._writer
        begun = [writer.ids(len(row) - len(row) // 3) for row in rows]
        others, prompts = ([writer.prompt(b + writer.ids(len(r) // 3)) for b, r in zip(begun, rows)] for _ in range(2))
        try:
            self._server.alone(others, 1, salt)
            found = self._server.alone(prompts, TOKENS, salt)
            reference = self._alone(prompts, salt)
        except (TimeUp, Refused, ServerFailed) as error:
            return ProbeResult(name, "cached prefix", "not reached", why=_why(error))
        return self._cached(name, reference, lambda: found)

    def _batches(self, prompts: Sequence[Prompt], size: int, same: str) -> list[Answer]:
        """Ask for the answers in groups of `size`. Other prompts fill up a group that is too small."""
        groups = [list(prompts[at : at + size]) for at in range(0, len(prompts), size)]
        found = []
        for group in groups:
            fill = [self._writer.prompt(self._writer.ids(20 + place)) for place in range(size - len(group))]
            found += self._server.together(group + fill, TOKENS, self._salt(same))[: len(group)]
        return found

    def _scored(self, rows: Sequence[list[int]], reference: Sequence[Answer]) -> Iterator[ProbeResult]:
        """Ask for the log-probabilities of answers that are given with the prompts: prefilled, not decoded."""
        ways: tuple[tuple[str, Cause], ...] = (
            ("prefilled, not decoded", self._cause("prefill")),
            ("prefilled together", "batch"),
        )
        whole = [_joined(row, answer.tokens) for row, answer in zip(rows, reference, strict=True)]
        alone: list[Answer] = []
        for name, cause in ways:
            if not all(_has_ids(answer) for answer in reference):
                yield ProbeResult(name, cause, "absent", why=NO_IDS)
                continue
            salt = next(self._salts)
            try:
                asked = [whole] if cause == "batch" else [[row] for row in whole]
                scores = [each for rows in asked for each in self._server.score(rows, salt) or ()]
            except (TimeUp, Refused, ServerFailed) as error:
                yield ProbeResult(name, cause, "not reached", why=_why(error))
                continue
            values = [each.scored for each in scores if each.scored is not None]
            if len(values) != len(whole):
                yield ProbeResult(name, cause, "absent", why="the server gives no log-probabilities of prompts")
                continue
            found = [Answer(r.tokens, v[-TOKENS:]) for r, v in zip(reference, values, strict=True)]
            yield self._way(name, cause, alone or reference, lambda found=found: found)  # type: ignore[misc]
            alone = alone or found

    @contextmanager
    def _load(self) -> Iterator[None]:
        """Let the server sample other answers, again and again, while the block runs."""
        prompts = [self._writer.prompt(self._writer.ids(10 + 3 * place)) for place in range(LOAD)]
        over = threading.Event()

        def go_on() -> None:
            with suppress(TimeUp, Refused, ServerFailed, UserError):
                while not over.is_set():
                    self._server.together(prompts, LOAD_TOKENS, "fp8rl-certify-load", temperature=1.0)

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _long(self) -> Iterator[ProbeResult]:
        """Ask for answers to long prompts in other chunks: they begin after a cached prefix or another prompt's end."""
        names = "long, their beginning cached", "long, at the same time"
        try:
            rows = self._writer.long()
        except (TimeUp, ServerFailed) as error:
            yield from (ProbeResult(name, "chunked prefill", "not reached", why=_why(error)) for name in names)
            return
        chunk = self._server.chunk
        if not rows or (chunk is not None and len(rows[-1]) <= chunk):
            why = f"no prompt that the server takes is longer than {chunk or SHORTEST_LONG} tokens"
            yield from (ProbeResult(name, "chunked prefill", "absent", why=why) for name in names)
            return
        longest = [self._writer.prompt(row) for row in rows]
        begun = [self._writer.prompt(row[: len(row) * 3 // 8]) for row in rows[:1]]
        salt, other = next(self._salts), next(self._salts)

        def behind() -> tuple[list[Answer], list[Answer]]:
            self._server.alone(begun, 1, salt)
            return self._server.alone(longest[:1], TOKENS, salt), self._alone(longest[:1], salt)

        def together() -> tuple[list[Answer], list[Answer]]:
            found = self._server.together(longest[1:], TOKENS, other)
            return found, self._alone(longest[1:], other)

        simpler: tuple[Cause, Cause] = "cached prefix", "batch"
        for name, ask, other_cause in zip(names, (behind, together), simpler, strict=True):
            cause = self._cause("chunked prefill", other_cause)
            try:
                found, reference = ask()
            except (TimeUp, Refused, ServerFailed) as error:
                yield ProbeResult(name, cause, "not reached", why=_why(error))
                continue
            yield self._way(name, cause, reference, lambda found=found: found)  # type: ignore[misc]


def _has_ids(answer: Answer) -> bool:
    return all(isinstance(token, int) for token in answer.tokens) and len(answer.tokens) == TOKENS


def _joined(row: list[int], tokens: Sequence[int | str]) -> list[int]:
    return row + [token for token in tokens if isinstance(token, int)]


def _why(error: Exception) -> str:
    return TIME_OVER if isinstance(error, TimeUp) else f"the server did not answer: {error}"
