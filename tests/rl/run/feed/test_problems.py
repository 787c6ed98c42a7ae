"""The order of a run's problems, over one source and over several."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.rl.run.feed.problems import Stream, _floor_sum


def stream(*sources: range | list[str], weights: list[float] | None = None, seed: int = 0) -> Stream:
    return Stream(sources, weights or [1.0] * len(sources), seed)


@given(items=st.integers(1, 40), count=st.integers(1, 50), seed=st.integers(0, 3), epochs=st.integers(1, 3))
def test_every_item_is_seen_once_before_any_is_seen_again(items: int, count: int, seed: int, epochs: int) -> None:
    steps = -(-items * epochs // count)
    order = stream(range(items), seed=seed)
    seen = [item for step in range(1, steps + 1) for item in order.of_step(step, count)]
    assert len(seen) == steps * count
    for epoch in range(epochs):
        assert Counter(seen[epoch * items : (epoch + 1) * items]) == Counter(range(items))


def test_the_order_of_one_source_is_that_of_published_results() -> None:
    for epoch in range(3):
        expected = torch.randperm(7, generator=torch.Generator().manual_seed(5 * 1_000_003 + epoch)).tolist()
        assert [stream(range(7), seed=5).nth(epoch * 7 + place) for place in range(7)] == expected


@given(n=st.integers(0, 60), m=st.integers(1, 50), a=st.integers(0, 200), b=st.integers(0, 200))
def test_the_sum_of_floors(n: int, m: int, a: int, b: int) -> None:
    assert _floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@pytest.mark.slow
@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 1.0, 0.5], [1e-3, 1.0], [0.1] * 10])
@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_sources_come_in_their_proportions_and_each_counts_its_own(weights: list[float], seed: int) -> None:
    order = stream(*[range(9)] * len(weights), weights=weights, seed=seed)
    seen = [0] * len(weights)
    for number in range(2000):
        source, before = order.place(number)
        assert before == seen[source]
        seen[source] += 1
        for count, weight in zip(seen, weights):
            assert abs(count - (number + 1) * weight / sum(weights)) < 4, "at every prompt, not only in the long run"
    assert order.place(10**15)[1] == pytest.approx(10**15 * weights[order.place(10**15)[0]] / sum(weights), abs=60)


def test_each_source_is_seen_whole_in_an_order_of_its_own() -> None:
    sources = [[f"{letter}{i}" for i in range(30)] for letter in "ab"]
    order = stream(*sources, seed=3)
    seen = [order.nth(number) for number in range(90)]
    first = {letter: [item[1:] for item in seen if item[0] == letter][:30] for letter in "ab"}
    assert all(len(set(items)) == 30 for items in first.values()) and first["a"] != first["b"]
    assert stream(*sources, seed=3).nth(7) == seen[7]
    assert seen != [stream(*sources, seed=4).nth(n) for n in range(90)]
