"""Failures of functions that a spec names: they are counted and explained, and too many of them end the run."""

from __future__ import annotations

FIRST = 8
"""Calls of a function, the first ones of a run, that end it if they all fail in the same way."""


class TooManyFailuresError(RuntimeError):
    """Functions that the spec names have failed more often than it allows."""


class Failures:
    """Counts, explains and limits the failures of one kind of user function in a run.

    Args:
        what: its name in messages, as "reward" in "the reward math has failed".
        meaning: what a failure does to the answer.
        metric: the metric that counts failures.
        key: the spec's key of the limit.
        limit: the most failures in a run.
        at_once: stop the run if its first calls all fail in the same way.
    """

    def __init__(self, what: str, meaning: str, metric: str, key: str, limit: int, at_once: bool = False) -> None:
        self.what, self.metric = what, metric
        self._meaning, self._key, self._limit = meaning, key, limit
        self._count = 0
        self._same: list[str] | None = [] if at_once else None
        self._explained: set[str] = set()
        self._new: list[str] = []

    def succeeded(self) -> None:
        """Note that a call has not failed."""
        self._same = None

    def add(self, label: str, why: str) -> None:
        """Note that a call of `label` has failed. Raises TooManyFailuresError at one too many, and where the first ones
        have all failed in the same way."""
        self._count += 1
        if self._same is not None:
            self._same.append(why.rstrip().rpartition("\n")[2])
            if len(self._same) == FIRST and len(set(self._same)) == 1:
                raise TooManyFailuresError(
                    f"found that the first {FIRST} calls of the {self.what} {label} have all failed in the same way, "
                    f"expected one that succeeds: {why.rstrip()}"
                )
        first = label not in self._explained
        self._explained.add(label)
        self._new.append(f"the {self.what} {label} has failed, {self._meaning}: {why.rstrip()}" if first else "")
        if self._count > self._limit:
            raise TooManyFailuresError(
                f"found {self._count} failures of {self.what}s, expected at most {self._limit} ({self._key}). "
                f"The last one, of {label}: {why.rstrip()}"
            )

    def new_messages(self, only_if_explained: bool = False) -> list[str]:
        """Return one text per failure since the last call: the reason for a function's first failure, else empty.

        only_if_explained: return nothing unless one has a reason.
        """
        if only_if_explained and not any(self._new):
            return []
        said, self._new = self._new, []
        return said
