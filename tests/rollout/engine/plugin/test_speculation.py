"""Which drafts are accepted, against tokens that are drawn one after the other."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from fp8rl.numerics.ops import draw
from fp8rl.numerics.sampling import GREEDY
from fp8rl.rollout.engine.plugin.speculation import Rows, accepted

VOCABULARY, WIDTH, TOKENS = 6, 4, 40


def logits_behind(tokens: list[int]) -> torch.Tensor:
    """Of a model: a function of all tokens before."""
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(hash(tuple(tokens)) % (1 << 31)))


def drawn_behind(tokens: list[int], seed: int) -> int:
    found = draw(logits_behind(tokens)[None], torch.ones(1), torch.tensor([seed]), torch.tensor([len(tokens) - 1]))
    return int(found)


def one_after_the_other(prompt: list[int], seed: int, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(drawn_behind(tokens, seed))
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [GREEDY, 3, 8])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_whatever_is_drafted_the_tokens_are_those_that_are_drawn_one_after_the_other(seed: int, right: float) -> None:
    """Three answers in one batch, each with as many drafts as chance gives it."""
    prompts, chance = [[1], [4, 4], [2, 5, 3]], random.Random(seed)
    expected = [one_after_the_other(prompt, seed, TOKENS + WIDTH) for prompt in prompts]
    said: list[list[int]] = [[] for _ in prompts]
    passes = 0
    while min(map(len, said)) < TOKENS:
        drafts = torch.full((len(prompts), WIDTH - 1), -1)
        drawn = torch.full((len(prompts), WIDTH), -1)
        for row, prompt in enumerate(prompts):
            seen = prompt + said[row]
            drawn[row, 0] = drawn_behind(seen, seed)
            for place in range(chance.randrange(WIDTH)):
                truth = (expected[row] + [0] * WIDTH)[len(said[row]) + place]
                drafts[row, place] = truth if chance.random() < right else chance.randrange(VOCABULARY)
                seen.append(int(drafts[row, place]))
                drawn[row, place + 1] = drawn_behind(seen, seed)
        kept = accepted(drafts, drawn)
        assert 1 <= kept.min() and (kept <= 1 + (drafts >= 0).sum(-1)).all()
        for row, count in enumerate(kept.tolist()):
            said[row] += drawn[row, :count].tolist()
        passes += 1
    assert [tokens[:TOKENS] for tokens in said] == [tokens[:TOKENS] for tokens in expected]
    assert (passes < 0.7 * TOKENS) == (right == 1.0) or right == 0.6


def test_a_draft_behind_a_wrong_one_is_not_accepted_though_it_is_drawn() -> None:
    drafts = torch.tensor([[7, 8, 9], [7, 0, 9], [0, 8, 9], [-1, -1, -1], [7, -1, -1]])
    drawn = torch.tensor([[7, 8, 9, 1]] * 3 + [[7, -1, -1, -1], [7, 8, -1, -1]])
    assert accepted(drafts, drawn).tolist() == [4, 2, 1, 1, 2]


def test_the_rows_of_a_pass_stand_one_answer_after_the_other() -> None:
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(output_ids=[3, 11]), SimpleNamespace(output_ids=[12])],
        seq_lens=torch.tensor([9, 4]),
        req_pool_indices=torch.tensor([1, 0]),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(40).view(2, 20)),
    )
    rows = Rows.of(batch, [[21, 22], []], width=4)
    assert rows.tokens.tolist() == [11, 21, 22, 12]
    assert rows.positions.tolist() == [9, 10, 11, 4] and rows.owner.tolist() == [0, 0, 0, 1]
    assert rows.slots(batch).tolist() == [29, 30, 31, 4]
    assert rows.wide(rows.tokens).tolist() == [[11, 21, 22, -1], [12, -1, -1, -1]]


def test_what_the_sampler_says_of_a_row_is_where_sglang_looks_for_it() -> None:
    batch = SimpleNamespace(reqs=[SimpleNamespace(output_ids=[3]), SimpleNamespace(output_ids=[12])])
    batch.seq_lens = torch.tensor([9, 4])
    output = SimpleNamespace(
        next_token_logprobs=torch.tensor([-0.5, -0.25, -2.0]),
        next_token_top_logprobs_val=list(torch.tensor([[-0.5, -1.0], [-0.25, -3.0], [-2.0, -2.5]])),
        next_token_top_logprobs_idx=list(torch.tensor([[1, 2], [3, 4], [5, 6]])),
        next_token_token_ids_logprobs_val=None,
        next_token_token_ids_logprobs_idx=None,
    )
    Rows.of(batch, [[21], []], width=3).widen(output)
    assert output.next_token_logprobs.tolist() == [[-0.5, -0.25, -1.0], [-2.0, -1.0, -1.0]]
    assert [each.tolist() for each in output.next_token_top_logprobs_idx] == [[1, 2], [3, 4], [], [5, 6], [], []]
    assert output.next_token_token_ids_logprobs_val is None
