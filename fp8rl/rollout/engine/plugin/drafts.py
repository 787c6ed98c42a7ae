"""Drafts: tokens that probably come next in an answer, by what answers said before after the same tokens.

No token of any answer depends on what is drafted (`engine.plugin.speculation`), so the memory has a fixed size and
forgets as it likes. It is a table such as processors predict branches with: several numbers of tokens before have a
slot by their hash (Seznec and Michaud, "A case for (partially) tagged geometric history length branch prediction",
2006).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fp8rl.rollout.config import Source

Ints: TypeAlias = NDArray[np.int64]
Hashes: TypeAlias = NDArray[np.uint64]

LENGTHS = (2, 4, 6, 8, 12)
"""Tokens before that are looked up."""
CONTEXT = max(LENGTHS)
STRENGTHS = 4
_SLOTS_LOG2 = 21
_KEPT = 0.998
"""The share of a count that is left after one more forward pass."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Drafts:
    """The table, and how often it is right.

    A slot holds the token that came next; how sure that is, from 1 to 3, and 0 in an empty slot; and a check, by which
    other hashes that fall into it are told apart. Each token that was drawn says of every entry that was there for it
    whether that was right, drafted or not: so the rates are known also where nothing is drafted.
    """

    def __init__(self, source: Source, slots_log2: int = _SLOTS_LOG2) -> None:
        self._source = source
        self._shift = np.uint64(64 - slots_log2)
        self._tokens = np.zeros(1 << slots_log2, np.int32)
        self._checks = np.zeros(1 << slots_log2, np.uint32)
        self._strengths = np.zeros(1 << slots_log2, np.int8)
        places = len(LENGTHS) * (1 if source == "siblings" else 2)
        self._right = np.zeros(places * STRENGTHS)
        self._seen = np.zeros(places * STRENGTHS)

    def draft(self, contexts: Ints, prompts: Ints, version: int, room: Ints, least: float) -> list[list[int]]:
        """The tokens that are drafted behind each of R contexts.

        Args:
            contexts: [R, CONTEXT], the last tokens of each answer, with its prompt.
            prompts: [R], a number of each prompt.
            version: of the weights.
            room: [R], most tokens of each.
            least: a token is drafted if all up to it come with more than this probability.
        """
        drafts: list[list[int]] = [[] for _ in contexts]
        salts, rates = self._salts(prompts, version), self._rates()
        rows, sure, count = np.flatnonzero(room > 0), np.ones(len(contexts)), 0
        while len(rows):
            slots, cells, _ = self._found(contexts[rows], salts[:, rows])
            likely = rates[cells]
            best = likely.argmax(0)[None]
            sure[rows] *= np.take_along_axis(likely, best, 0)[0]
            tokens = self._tokens[np.take_along_axis(slots, best, 0)[0]]
            goes = sure[rows] > least
            rows, tokens, count = rows[goes], tokens[goes], count + 1
            for row, token in zip(rows.tolist(), tokens.tolist()):
                drafts[row].append(token)
            contexts = contexts.copy()
            contexts[rows] = np.concatenate((contexts[rows, 1:], tokens[:, None]), 1)
            rows = rows[room[rows] > count]
        return drafts

    def learn(self, contexts: Ints, prompts: Ints, version: int, tokens: Ints) -> None:
        """Remember that each of N tokens came behind its context [N, CONTEXT]."""
        slots, cells, checks = self._found(contexts, self._salts(prompts, version))
        strengths = cells % STRENGTHS
        right = (strengths > 0) & (self._tokens[slots] == tokens)
        self._seen = _KEPT * self._seen + np.bincount(cells.ravel(), minlength=self._seen.size)
        self._right = _KEPT * self._right + np.bincount(cells[right], minlength=self._right.size)
        strengths = np.where(right, np.minimum(strengths + 1, STRENGTHS - 1), np.maximum(strengths - 1, 0))
        anew = strengths == 0
        self._tokens[slots[anew]] = np.broadcast_to(tokens, slots.shape)[anew]
        self._checks[slots[anew]] = checks[anew]
        self._strengths[slots] = np.where(anew, 1, strengths)

    def _rates(self) -> NDArray[np.float64]:
        """Rates at which entries were right of late, by place and strength; unseen ones count as half."""
        rates = (self._right + 0.5) / (self._seen + 1.0)
        rates[::STRENGTHS] = 0.0  # empty
        return rates

    def _salts(self, prompts: Ints, version: int) -> Hashes:
        """Return where the hashes of each source begin: [sources, R]."""
        same = _mixed(prompts.astype(np.uint64), _ODD)
        if self._source == "siblings":
            return _mixed(same, np.uint64(version + 1))[None]
        return np.stack((same, np.zeros_like(same)))

    def _found(self, contexts: Ints, salts: Hashes) -> tuple[Ints, Ints, NDArray[np.uint32]]:
        """The slots of R contexts for each source and length, the places with the strengths of their entries, and the
        checks: [places, R] each.
        """
        hashes, each = salts, []
        for n in range(1, CONTEXT + 1):
            hashes = _mixed(hashes, contexts[:, -n].astype(np.uint64))
            if n in LENGTHS:
                each.append(hashes)
        hashes = np.concatenate(each)
        slots, checks = (hashes >> self._shift).astype(np.int64), hashes.astype(np.uint32)
        strengths = np.where(self._checks[slots] == checks, self._strengths[slots], 0)
        return slots, strengths + STRENGTHS * np.arange(len(slots))[:, None], checks


class DraftCost:
    """Says from which probability on a drafted token saves time.

    The time of a forward pass is fitted as a + b · rows over recent passes.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(5)
        self._slope = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Note that a pass with so many rows took so long."""
        self._sums = 0.99 * self._sums + (1, rows, rows * rows, seconds, rows * seconds)

    def threshold(self, answers: int) -> float:
        """Return the probability from which on a draft pays beside so many answers: b · answers / (a + b · answers).

        Without drafts a pass gives each answer a token: `answers` in a + b · answers seconds. A row more, right with
        probability p, takes b seconds more, so tokens come faster if p is above this.
        """
        n, x, xx, y, xy = self._sums
        if n == 0:
            return 0.0
        spread = n * xx - x * x
        if spread > 1e-3 * x * x:  # else the slope is still that of before
            self._slope = (n * xy - x * y) / spread
        of_rows = min(max(self._slope, 0.0) * n, n * y / x) * answers / n
        return float(of_rows / (max(y / n - self._slope * x / n, 0.0) + of_rows)) if of_rows else 0.0


def _mixed(hashes: Hashes, values: Hashes | np.uint64) -> Hashes:
    product = (hashes ^ values) * _ODD
    return product ^ (product >> np.uint64(29))
