from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rl.run.problems import of_step


@given(items=st.integers(1, 40), count=st.integers(1, 50), seed=st.integers(0, 3), epochs=st.integers(1, 3))
def test_every_item_is_seen_once_before_any_is_seen_again(items: int, count: int, seed: int, epochs: int) -> None:
    steps = -(-items * epochs // count)
    stream = [item for step in range(1, steps + 1) for item in of_step(range(items), step, count, seed)]
    assert len(stream) == steps * count
    for epoch in range(epochs):
        assert Counter(stream[epoch * items : (epoch + 1) * items]) == Counter(range(items))


def test_a_step_depends_on_seed_and_step_alone() -> None:
    items = list(range(1000))
    assert of_step(items, 7, 32, seed=0) == of_step(items, 7, 32, seed=0)
    assert of_step(items, 7, 32, seed=0) != of_step(items, 7, 32, seed=1)
    assert not set(of_step(items, 7, 32, seed=0)) & set(of_step(items, 8, 32, seed=0))


def test_each_epoch_has_its_own_order() -> None:
    first, second = (of_step(list(range(100)), epoch, 100, seed=0) for epoch in (1, 2))
    assert first != second and sorted(first) == sorted(second)
