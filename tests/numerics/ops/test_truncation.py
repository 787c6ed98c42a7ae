"""What top-p, top-k and min-p leave: said by hand in whole numbers, the same in every batch, and drawn as often as it
should be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fp8rl.numerics import ops
from fp8rl.numerics.ops.draw import weights

OFF = (1.0, -1, 0.0)
CASES = {"top-p": (0.9, -1, 0.0), "top-k": (1.0, 20, 0.0), "both": (0.9, 20, 0.0), "min-p": (1.0, -1, 0.05)}


def floors(logits: torch.Tensor, top_p: float, top_k: int, min_p: float, temperature: float = 1.0) -> torch.Tensor:
    rows = len(logits)
    of_rows = torch.full((rows,), top_p), torch.full((rows,), top_k), torch.full((rows,), min_p)
    return ops.truncation_floors(logits, torch.full((rows,), temperature), *of_rows)


def kept(probs: list[float], *setting: float) -> list[int]:
    """The tokens that stay, of a distribution."""
    logits = torch.tensor([probs]).log()
    return (logits[0] >= floors(logits, *setting)).nonzero().flatten().tolist()  # type: ignore[arg-type]


def test_each_setting_looks_at_the_whole_distribution() -> None:
    probs = [0.1, 0.5, 0.25, 0.15]
    assert kept(probs, *OFF) == [0, 1, 2, 3]
    assert kept(probs, 0.45, -1, 0.0) == [1]
    assert kept(probs, 0.7, -1, 0.0) == [1, 2]
    assert kept(probs, 0.8, -1, 0.0) == [1, 2, 3]
    assert kept(probs, 1.0, 3, 0.0) == [1, 2, 3]
    assert kept(probs, 0.7, 3, 0.0) == [1, 2]
    assert kept(probs, 0.95, 2, 0.0) == [1, 2]
    assert kept(probs, 1.0, -1, 0.25) == [1, 2, 3]
    assert kept(probs, 1e-300, -1, 0.0) == kept(probs, 1.0, 1, 0.0) == kept(probs, 1.0, -1, 1.0) == [1]
    assert kept(probs, 1.0, 4, 0.0) == kept(probs, 1.0, 5, 0.0) == [0, 1, 2, 3]


def test_equal_logits_stay_or_go_together() -> None:
    probs = [0.3, 0.1, 0.2, 0.2, 0.2]
    for setting in ((1.0, 2, 0.0), (0.35, -1, 0.0), (0.6, 3, 0.0)):
        assert kept(probs, *setting) == [0, 2, 3, 4]
    assert kept([0.25] * 4, 0.1, 1, 1.0) == [0, 1, 2, 3]


def test_nan_and_infinity_have_their_place() -> None:
    logits = torch.tensor([[math.nan, 1.0, -torch.inf, 0.0], [math.inf, 1.0, math.inf, 0.0], [-math.inf] * 4])
    assert floors(logits, 0.9, -1, 0.01).tolist() == [0.0, math.inf, -math.inf]
    assert floors(logits, 0.9, 1, 0.0).tolist() == [1.0, math.inf, -math.inf]
    assert floors(logits, *OFF).tolist() == [-math.inf, 0.0, -math.inf]


def test_weights_are_the_softmax_in_whole_numbers() -> None:
    logits = torch.linspace(-45, 0, 10_001)[None] * 0.7
    found = weights(logits, torch.zeros(1, 1), torch.full((1, 1), 0.7))[0]
    expected = ((logits / 0.7).double().exp() * 2**40)[0]
    assert found[-1] == 2**40 and ((found.double() - expected).abs() <= 1 + expected * 1e-13).all()


@given(
    rows=st.integers(1, 12),
    vocabulary=st.integers(1, 200),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    setting=st.tuples(st.floats(0.01, 1.0), st.integers(-1, 30), st.floats(0.0, 1.0)),
)
@settings(max_examples=40, deadline=None)
def test_a_row_keeps_the_same_in_every_batch_and_order(
    rows: int, vocabulary: int, seed: int, dtype: torch.dtype, setting: tuple[float, int, float]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 3).to(dtype)
    whole = floors(logits, *setting, temperature=0.7)
    assert whole[:1].equal(floors(logits[:1], *setting, temperature=0.7))
    shuffled = logits[:, torch.randperm(vocabulary, generator=generator)]
    assert whole.equal(floors(shuffled, *setting, temperature=0.7))
    for row, floor in zip(logits.float().tolist(), whole.tolist(), strict=True):
        assert floor == by_hand(row, *setting, temperature=0.7)


def by_hand(row: list[float], top_p: float, top_k: int, min_p: float, temperature: float) -> float:
    """Token by token, in Python's own whole numbers."""
    values = torch.tensor([row])
    weight = weights(values, values.amax(-1, keepdim=True), torch.full((1, 1), temperature))[0].tolist()
    top_p, min_p = (float(torch.tensor(each)) for each in (top_p, min_p))
    staying = []
    for token, mine in zip(row, weight, strict=True):
        larger = [w for other, w in zip(row, weight, strict=True) if other > token]
        few = not 0 < top_k < len(row) or len(larger) < top_k
        early = top_p >= 1 or float(sum(larger)) < top_p * float(sum(weight))
        staying += [token] if few and early and mine >= min_p * 2.0**40 else []
    return min(staying)


@pytest.mark.parametrize("setting", CASES.values(), ids=CASES)
def test_draws_come_as_often_as_the_truncated_softmax_says(setting: tuple[float, int, float]) -> None:
    count = 40_000
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)) * 1.5
    left = ops.narrowed(logits, floors(logits, *setting, temperature=0.8))
    drawn = ops.draw(left.expand(count, -1), torch.full((count,), 0.8), torch.arange(count) * 7, torch.arange(count))
    expected = (left[0].double() / 0.8).softmax(0) * count
    inside = expected > 0
    assert 1 < inside.sum() < 64 and not drawn.bincount(minlength=64)[~inside].any()
    assert chisquare(drawn.bincount(minlength=64)[inside].numpy(), expected[inside].numpy()).pvalue > 0.01


@pytest.mark.parametrize("setting", CASES.values(), ids=CASES)
def test_logprobs_entropy_and_gradients_are_those_of_the_truncated_distribution(
    setting: tuple[float, int, float],
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(7, 80, generator=generator) * 2).requires_grad_()
    floor = floors(logits.detach(), *setting, temperature=0.9)
    tokens = logits.argmax(-1)
    d = torch.randn(2, 7, generator=generator)
    found = ops.token_logprobs(ops.narrowed(logits, floor), tokens, 0.9)
    (found[0] * d[0] + found[1] * d[1]).sum().backward()

    wide = logits.detach().double().requires_grad_()
    out = logits.detach() < floor[:, None]
    logp = (wide / 0.9).masked_fill(out, -torch.inf).log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(out, 0.0)).sum(-1)
    expected = logp.gather(-1, tokens[:, None])[:, 0], entropy
    (expected[0] * d[0] + expected[1] * d[1]).sum().backward()
    assert out.any() and logits.grad is not None and wide.grad is not None
    for mine, theirs in (*zip(found, expected, strict=True), (logits.grad, wide.grad)):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)
    assert not logits.grad[out].any()
