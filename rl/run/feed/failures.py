"""Failures of a user's functions: counted, explained once for each function, and bounded."""

from __future__ import annotations


class TooManyFailuresError(RuntimeError):
    """Functions that the spec names have failed more often than it allows."""


class Failures:
    """What has failed of one kind of functions in a run.

    what: it in words, as in "the reward math". meaning: of a failure for the answer. metric: counts them. key: of the
    spec, that bounds their number by `limit`.
    """

    def __init__(self, what: str, meaning: str, metric: str, key: str, limit: int) -> None:
        self.what, self.metric = what, metric
        self._meaning, self._key, self._limit = meaning, key, limit
        self._count = 0
        self._explained: set[str] = set()
        self._news: list[str] = []

    def add(self, label: str, why: str) -> None:
        """Note that a call of `label` has failed. Raises TooManyFailuresError at one too many."""
        self._count += 1
        first = label not in self._explained
        self._explained.add(label)
        self._news.append(f"the {self.what} {label} has failed, {self._meaning}: {why.rstrip()}" if first else "")
        if self._count > self._limit:
            raise TooManyFailuresError(
                f"found {self._count} failures of {self.what}s, expected at most {self._limit} ({self._key}). "
                f"The last one, of {label}: {why.rstrip()}"
            )

    def news(self) -> list[str]:
        """A text for each that was added since this was last asked: why, for a function's first one, and nothing for
        its others."""
        said, self._news = self._news, []
        return said
