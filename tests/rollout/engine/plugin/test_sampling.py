"""Seeds of a batch, and the draw from probabilities in native mode, at SGLang's own sampler."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from fp8rl.numerics.ops import draw
from fp8rl.numerics.sampling import GREEDY, canary_seed
from fp8rl.rollout.engine.plugin import sampling

TOP_K_ALL = 1 << 30


def request(seed: int | None, top_k: int = TOP_K_ALL) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed, top_k=top_k))


def test_every_request_has_its_seed_and_one_without_keeps_what_it_is_given() -> None:
    batch = SimpleNamespace(reqs=[request(5), request(None), request(None), request(9, top_k=1)])
    seeds = [
        sampling.seeds_of_batch(SimpleNamespace(device="cpu"), None, batch, 64).sampling_seed.tolist() for _ in range(2)
    ]
    assert seeds[0] == seeds[1]
    assert seeds[0][0] == 5 and seeds[0][3] == GREEDY
    assert len(set(seeds[0])) == 4 and min(seeds[0][1:3]) >= 0


def info(**changes: Any) -> Any:
    """SGLang's own, of two sampled rows and a greedy one."""
    module = pytest.importorskip("sglang.srt.sampling.sampling_batch_info")
    of_rows = {"temperatures": torch.ones(3, 1), "top_ps": torch.ones(3), "min_ps": torch.zeros(3), "vocab_size": 9}
    of_rows |= {"top_ks": torch.tensor([TOP_K_ALL, TOP_K_ALL, 1]), "sampling_seed": torch.tensor([3, 4, GREEDY])}
    needs = {"need_top_p_sampling": False, "need_top_k_sampling": True, "need_min_p_sampling": False}
    values = of_rows | needs | {"is_all_greedy": False, "is_any_greedy": True}
    return module.SamplingBatchInfo(**{**values, **changes})


def drawn(logits: torch.Tensor, batch: Any, positions: torch.Tensor) -> torch.Tensor:
    """The tokens of exact mode."""
    return sampling.of_samples(
        pytest.fail, None, SimpleNamespace(next_token_logits=logits), batch, False, [], [], positions
    )


def stock(self: Any, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple: bool) -> torch.Tensor:
    assert sampling_info.sampling_seed is None  # or SGLang would draw from what is not normalised
    return torch.tensor([7, 7, 7], dtype=torch.int32)


def test_native_draws_are_those_of_the_logits_and_greedy_rows_among_them_stay_greedy() -> None:
    logits, positions = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)), torch.arange(3)
    tokens = sampling.draw_from_probabilities(stock, None, logits.softmax(-1), info(), positions, False)
    assert tokens.equal(draw(logits, torch.ones(3), torch.tensor([3, 4, GREEDY]), positions).int())
    assert tokens[2] == logits[2].argmax()


@pytest.mark.parametrize(
    ("changes", "warper"),
    [
        ({"top_ks": torch.full((3,), 4), "need_top_k_sampling": True}, TopKLogitsWarper(4)),
        ({"top_ps": torch.full((3,), 0.8), "need_top_p_sampling": True}, TopPLogitsWarper(0.8)),
        ({"min_ps": torch.full((3,), 0.2), "need_min_p_sampling": True}, MinPLogitsWarper(0.2)),
    ],
    ids=["top-k", "top-p", "min-p"],
)
def test_exact_draws_of_a_narrowed_choice_are_those_of_what_is_left(changes: dict[str, Any], warper: Any) -> None:
    positions, seeds = torch.arange(3), torch.tensor([3, 4, 5])
    all_tokens, temperatures = torch.full((3,), TOP_K_ALL), torch.full((3, 1), 0.7)
    batch = info(sampling_seed=seeds, top_ks=all_tokens, is_any_greedy=False, temperatures=temperatures)
    batch = dataclasses.replace(batch, **changes)
    for number in range(20):
        logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(number))
        left = warper(torch.zeros(3, 1, dtype=torch.int64), logits / 0.7)
        assert left.isneginf().any()
        assert (sampling.narrowed(logits, batch).isneginf() == left.isneginf()).all()
        expected = draw(logits.masked_fill(left.isneginf(), -torch.inf), torch.full((3,), 0.7), seeds, positions)
        assert drawn(logits, batch, positions).equal(expected.int())


def known(positions: torch.Tensor) -> list[int]:
    """The tokens of a canary, from the definition of the draw: of logits that are all alike."""
    count = len(positions)
    return draw(torch.zeros(count, 9), torch.ones(count), torch.full((count,), canary_seed(0)), positions).tolist()


@pytest.mark.parametrize("restricted", [{}, {"need_top_p_sampling": True}])
def test_the_tokens_of_a_canary_do_not_depend_on_logits_and_other_rows_do_not_on_it(restricted: dict[str, Any]) -> None:
    logits, positions = 50 * torch.randn(3, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([7, 8, 9])
    seeds = torch.tensor([3, canary_seed(0), canary_seed(0)])
    all_drawn = {"top_ks": torch.full((3,), TOP_K_ALL), "need_top_k_sampling": False}
    exact = drawn(logits, info(sampling_seed=seeds, **all_drawn), positions)
    probabilities, whole = logits.softmax(-1), info(sampling_seed=seeds, **all_drawn, **restricted)
    native = sampling.draw_from_probabilities(stock, None, probabilities, whole, positions, False)
    beside = draw(logits[:1], torch.ones(1), seeds[:1], positions[:1]).item()
    assert exact.tolist() == [beside, *known(positions[1:])]
    assert native.tolist() == [7 if restricted else beside, *known(positions[1:])]
