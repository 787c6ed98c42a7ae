"""The stream of events of a run; and the failures of the user's functions, which are counted and limited."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fp8rl.numerics.core.errors import printable

Handler = Callable[[str, int, str], object]
"""Takes an event: the metric that counts such events, how many there were, and a sentence."""
Progress = Callable[[int, int], object]
"""Takes the number of groups that are answered, and the number that are waited for. Only the loop's thread calls it."""

ENGINES_REPLACED = "rollout/engines_replaced"
STALE_RESYNCS = "gates/stale_resyncs"
SYNCS_REPEATED = "sync/repeated"
REWARD_FAILURES = "rollout/reward_failures"
ENVIRONMENT_FAILURES = "rollout/environment_failures"
COUNTED = (ENGINES_REPLACED, STALE_RESYNCS, SYNCS_REPEATED, REWARD_FAILURES)
"""Metrics that each row of a run with engines has, also where nothing was counted."""


class Events:
    """Brings events from any thread to the subscriber, in the loop's own thread. Without a subscriber, events wait."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, int, str]] = deque()
        self._handle: Handler | None = None
        self.progress: Progress = lambda done, wanted: None

    def subscribe(self, handle: Handler) -> None:
        """Deliver events to `handle`, in place of the former subscriber."""
        self._handle = handle

    def add(self, metric: str, count: int, text: str) -> None:
        """Note an event, in any thread."""
        self._waiting.append((metric, count, text))

    def deliver(self) -> None:
        """Hand the subscriber the events that were added."""
        while self._handle is not None and self._waiting:
            self._handle(*self._waiting.popleft())

    def tell(self, metric: str, count: int, text: str) -> None:
        """Add an event and deliver it."""
        self.add(metric, count, text)
        self.deliver()


FIRST = 8
"""Number of first calls of a function after which a run ends if all of them have failed in the same way."""


class TooManyFailuresError(RuntimeError):
    """Functions that the spec names have failed more often than it allows."""


class FilterError(RuntimeError):
    """The algorithm keeps too few groups to fill a batch."""


class Failures:
    """Counts, explains and limits the failures of one kind of user function in a run.

    Args:
        what: the kind's name in messages, as "reward" in "the reward math has failed".
        meaning: what a failure does to the answer.
        metric: the metric that counts failures.
        key: the spec's key of the limit.
        limit: the most failures in a run.
        events: gets the first failure of each function when it happens, with the reason.
        at_once: stop the run if its first calls all fail in the same way.
    """

    def __init__(
        self, what: str, meaning: str, metric: str, key: str, limit: int, events: Events, at_once: bool = False
    ) -> None:
        self.events = events
        self._what, self._meaning, self._metric, self._key, self._limit = what, meaning, metric, key, limit
        self._count = self._more = 0
        self._same: list[str] | None = [] if at_once else None
        self._explained: set[str] = set()

    def succeeded(self) -> None:
        """Note that a call has not failed."""
        self._same = None

    def add(self, label: str, why: str) -> None:
        """Note that a call of `label` has failed. Raises TooManyFailuresError: there are more failures than allowed, or
        the first calls have all failed in the same way."""
        self._count, why = self._count + 1, printable(why.rstrip())
        if self._same is not None:
            self._same.append(why.rpartition("\n")[2])
            if len(self._same) == FIRST and len(set(self._same)) == 1:
                raise TooManyFailuresError(
                    f"found that the first {FIRST} calls of the {self._what} {label} have all failed in the same way, "
                    f"expected one of them to succeed: {why}"
                )
        if label in self._explained:
            self._more += 1
        else:
            self._explained.add(label)
            text = f"the {self._what} {label} has failed, {self._meaning}: {why}"
            self.events.add(self._metric, 1, text)
        if self._count > self._limit:
            raise TooManyFailuresError(
                f"found {self._count} failures of {self._what}s, expected at most {self._limit} ({self._key}). "
                f"Correct the {self._what}, or raise {self._key}. The last one, of {label}: {why}"
            )

    def tell(self) -> None:
        """Deliver the events. Failures since the last call of functions that had failed before are one event."""
        more, self._more = self._more, 0
        if more:
            self.events.add(self._metric, more, f"{more} more {self._what}s failed")
        self.events.deliver()
