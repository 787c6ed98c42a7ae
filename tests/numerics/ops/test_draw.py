"""The seeded draw: a function of its row alone, unbiased, and the same however rows are batched."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from fp8rl.numerics import ops
from fp8rl.numerics.ops.draw import draw, gumbel, weights
from fp8rl.numerics.sampling import GREEDY, answer_seed
from tests.numerics.test_stochastic import WORD, splitmix64

SIGNIFICANCE = 1e-4
DRAWS = 20_000


def drawn(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    rows = len(seeds)
    return draw(logits.expand(rows, -1), torch.full((rows,), temperature), seeds, positions)


@pytest.mark.parametrize("stride", [1, 4096, 0x9E3779B9])
@pytest.mark.parametrize("over", ["seeds", "positions"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_come_as_often_as_the_softmax_says(over: str, stride: int, temperature: float) -> None:
    logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(1))
    varied, fixed = torch.arange(DRAWS) * stride, torch.full((DRAWS,), 77)
    seeds, positions = (varied, fixed) if over == "seeds" else (fixed, varied)
    counts = drawn(logits, seeds, positions, temperature).bincount(minlength=16)
    expected = (logits[0].double() / temperature).softmax(0) * DRAWS
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > SIGNIFICANCE


def test_the_noise_is_gumbels() -> None:
    noise = gumbel(torch.arange(100), torch.arange(100), 1000).flatten()
    assert kstest(noise.numpy(), "gumbel_r").pvalue > SIGNIFICANCE and noise.unique().numel() == noise.numel()


@pytest.mark.slow
@given(
    rows=st.integers(1, 40),
    vocabulary=st.integers(1, 300),
    seed=st.integers(0, 2**62 - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_a_row_is_drawn_alike_in_every_batch(rows: int, vocabulary: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)
    temperatures = torch.rand(rows, generator=generator) + 0.3
    seeds = torch.randint(0, 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 2**20, (rows,), generator=generator)
    whole = draw(logits, temperatures, seeds, positions)
    order = torch.randperm(rows, generator=generator)
    assert whole[order].equal(draw(logits[order], temperatures[order], seeds[order], positions[order]))
    assert whole[:1].equal(draw(logits[:1], temperatures[:1], seeds[:1], positions[:1]))


@pytest.mark.slow
@given(seed=st.integers(0, 2**62 - 1), position=st.integers(0, 2**31), vocabulary=st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_the_noise_is_the_hash_of_seed_position_and_token(seed: int, position: int, vocabulary: int) -> None:
    """In Python's integers, where nothing wraps around by itself."""
    golden = 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        return splitmix64(x & WORD)

    row = mix(mix(seed + golden) ^ mix(position * golden + 1))
    uniform = [((mix(row + (token + 1) * golden) >> 12) + 0.5) / 2**52 for token in range(vocabulary)]
    expected = torch.tensor([-math.log(-math.log(u)) for u in uniform], dtype=torch.float64)
    found = gumbel(torch.tensor([seed]), torch.tensor([position]), vocabulary)[0]
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_a_large_vocabulary_is_drawn_in_pieces_as_in_one() -> None:
    logits = torch.randn(5, 100_000, generator=torch.Generator().manual_seed(0))
    arguments = logits, torch.ones(5), torch.arange(5), torch.arange(5)
    alone = [draw(*(value[row : row + 1] for value in arguments)) for row in range(5)]
    assert draw(*arguments).equal(torch.cat(alone))


def test_greedy_rows_take_the_best_token_and_nan_is_never_drawn() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [math.nan, -5.0, math.nan], [-torch.inf, 0.0, -torch.inf]])
    seeds = torch.tensor([GREEDY, 3, 4])
    assert draw(logits, torch.ones(3), seeds, torch.zeros(3, dtype=torch.int64)).tolist() == [1, 1, 1]


def test_seeds_of_answers_differ_and_stay_what_they_are() -> None:
    seeds = {answer_seed(*key) for key in [(0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2), (0, 12, 3, 0), (0, 1, 23, 0)]}
    assert len(seeds) == 5 and all(0 <= seed < 2**62 for seed in seeds)
    keys = itertools.product(range(20), range(20), range(8))
    assert len({answer_seed(0, *key) for key in keys}) == 3200
    # Pinned: a run that is resumed by a later version draws what it would have drawn.
    assert answer_seed(0, 1, 0, 0) == 4220987116127442091


OFF = (1.0, -1, 0.0)
CASES = {"top-p": (0.9, -1, 0.0), "top-k": (1.0, 20, 0.0), "both": (0.9, 20, 0.0), "min-p": (1.0, -1, 0.05)}


def floors(logits: torch.Tensor, top_p: float, top_k: int, min_p: float, temperature: float = 1.0) -> torch.Tensor:
    rows = len(logits)
    of_rows = torch.full((rows,), top_p), torch.full((rows,), top_k), torch.full((rows,), min_p)
    return ops.truncation_floors(logits, torch.full((rows,), temperature), *of_rows)


def kept(probs: list[float], *setting: float) -> list[int]:
    logits = torch.tensor([probs]).log()
    return (logits[0] >= floors(logits, *setting)).nonzero().flatten().tolist()  # type: ignore[arg-type]


def test_each_setting_looks_at_the_whole_distribution() -> None:
    probs = [0.1, 0.5, 0.25, 0.15]
    assert kept(probs, *OFF) == [0, 1, 2, 3] and kept(probs, 0.45, -1, 0.0) == [1]
    assert kept(probs, 0.7, -1, 0.0) == [1, 2] and kept(probs, 0.8, -1, 0.0) == [1, 2, 3]
    assert kept(probs, 1.0, 3, 0.0) == [1, 2, 3] and kept(probs, 0.7, 3, 0.0) == [1, 2]
    assert kept(probs, 0.95, 2, 0.0) == [1, 2] and kept(probs, 1.0, -1, 0.25) == [1, 2, 3]
    assert kept(probs, 1e-300, -1, 0.0) == kept(probs, 1.0, 1, 0.0) == kept(probs, 1.0, -1, 1.0) == [1]
    assert kept(probs, 1.0, 4, 0.0) == kept(probs, 1.0, 5, 0.0) == [0, 1, 2, 3]
    for setting in ((1.0, 2, 0.0), (0.35, -1, 0.0), (0.6, 3, 0.0)):  # equal logits stay or go together
        assert kept([0.3, 0.1, 0.2, 0.2, 0.2], *setting) == [0, 2, 3, 4]


def test_a_token_before_which_there_is_just_top_p_of_the_whole_goes() -> None:
    """By its definition: what weighs before a token that stays is less than top-p."""
    small = [math.log(weight / 2**40) for weight in (2048.5, 48.5)]  # fills what the FP32 logits of a quarter lack
    logits = torch.tensor([[0.0, -math.log(2), -math.log(2), *small]])
    weight = weights(logits, torch.zeros(1, 1), torch.ones(1, 1))
    assert int(weight.sum()) == 2 * int(weight[0, 0]) == 2**41 and floors(logits, 0.5, -1, 0.0).tolist() == [0.0]
    assert floors(logits, 0.5 + 2**-24, -1, 0.0).tolist() == [logits[0, 1]]


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
def test_a_row_keeps_the_same_in_every_batch_and_order(rows, vocabulary, seed, dtype, setting) -> None:
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
def test_logprobs_entropy_and_gradients_are_those_of_the_truncated_distribution(setting) -> None:
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
