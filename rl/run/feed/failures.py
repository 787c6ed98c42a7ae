"""Failures of a user's functions: counted, explained once for each function, and bounded."""

from __future__ import annotations


class TooManyFailuresError(RuntimeError):
    """Functions that the spec names have failed more often than it allows."""


FIRST = 8
"""Calls of a function, the first ones of a run, that end it if they all fail in the same way."""


class Failures:
    """What has failed of one kind of functions in a run.

    what: it in words, as in "the reward math". meaning: of a failure for the answer. metric: counts them. key: of the
    spec, that bounds their number by `limit`. at_once: a run whose first calls all fail in the same way ends.
    """

    def __init__(self, what: str, meaning: str, metric: str, key: str, limit: int, at_once: bool = False) -> None:
        self.what, self.metric = what, metric
        self._meaning, self._key, self._limit = meaning, key, limit
        self._count = 0
        self._same: list[str] | None = [] if at_once else None
        self._explained: set[str] = set()
        self._news: list[str] = []

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
        self._news.append(f"the {self.what} {label} has failed, {self._meaning}: {why.rstrip()}" if first else "")
        if self._count > self._limit:
            raise TooManyFailuresError(
                f"found {self._count} failures of {self.what}s, expected at most {self._limit} ({self._key}). "
                f"The last one, of {label}: {why.rstrip()}"
            )

    def news(self, only_if_explained: bool = False) -> list[str]:
        """A text for each that was added since this was last asked: why, for a function's first one, and nothing for
        its others. only_if_explained: none at all unless one of them is a function's first."""
        if only_if_explained and not any(self._news):
            return []
        said, self._news = self._news, []
        return said
