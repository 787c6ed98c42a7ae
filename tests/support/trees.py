"""Prefix trees for tests, built from their rows by looking each token up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

import torch

from fp8rl.numerics.ops import TokenTree


def tree_of(rows: Sequence[Sequence[int]], device: str = "cpu", stale: int = 0) -> TokenTree:
    """The tree of rows of tokens, which it sorts. stale: what its table holds behind the end of a path."""
    places: dict[tuple[int, int], int] = {}
    paths: list[list[int]] = []
    new: list[int] = []
    for row in sorted(rows):
        before, place, path = len(places), -1, []
        for token in row:
            place = places.setdefault((place, token), len(places))
            path.append(place)
        paths.append(path)
        new.append(len(places) - before)
    flat, end, longest = list(chain(*paths)), [0] * len(places), max(map(len, paths))
    for path in paths:
        for place in path:
            end[place] = max(end[place], path[-1] + 1)
    first = [flat.index(place) for place in range(len(places))]
    table = [path + [stale] * (longest - len(path)) for path in paths]
    return TokenTree(
        *(torch.tensor(each, device=device) for each in (new, [len(path) for path in paths], table, end, flat, first))
    )


def branching(depth: int, longest: int, seed: int) -> list[list[int]]:
    """Rows of a random tree: two or three branches behind each run of up to `longest` tokens, but for the runs that
    have depth - 1 before them. One row is there twice, and one ends within another."""
    draw = random.Random(seed)

    def rows(level: int) -> list[list[int]]:
        run = [draw.randrange(1000) for _ in range(draw.randint(1, longest))]
        branches = draw.randint(2, 3) if level < depth else 0
        return [run + row for _ in range(branches) for row in rows(level + 1)] or [run]

    found = rows(1)
    return [*found, found[0], found[-1][: len(found[-1]) // 2 + 1]]
