"""Tokens and log-probabilities in SGLang's sampler and its scorer of prompts, against log_softmax in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops import draw
from fp8rl.numerics.sampling import GREEDY
from fp8rl.rollout.engine.plugin import sampling
from tests.rollout.engine.plugin.test_sampling import info

VOCABULARY = 37
TEMPERATURES = (1.0, 0.7, 2.5)
SEEDS = torch.tensor([11, 12, GREEDY])


def expected(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return (logits.double() / temperature).log_softmax(-1)


def sample(return_logprob: bool, top: list[int], ids: list[list[int] | None], **how: Any) -> tuple[Tensor, Any, Tensor]:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 5
    output = SimpleNamespace(next_token_logits=logits.clone())
    batch = info(temperatures=torch.tensor(TEMPERATURES)[:, None], sampling_seed=SEEDS, **how)
    tokens = sampling.of_samples(pytest.fail, None, output, batch, return_logprob, top, ids, torch.arange(3))
    return logits, output, tokens


def test_sampled_tokens_are_reported_by_the_op_from_the_logits_before_they_are_overwritten() -> None:
    logits, output, tokens = sample(True, [0, 0, 0], [None, None, None])
    assert tokens.equal(draw(logits, torch.tensor(TEMPERATURES), SEEDS, torch.arange(3)).int())
    assert tokens[2] == logits[2].argmax()
    for row, temperature in enumerate(TEMPERATURES):
        reference = expected(logits[row], temperature)[tokens[row]]
        assert output.next_token_logprobs[row] == pytest.approx(float(reference), rel=1e-6, abs=1e-6)
        alone, _ = ops.token_logprobs(logits[row : row + 1], tokens[row : row + 1].long(), temperature)
        assert torch.equal(output.next_token_logprobs[row], alone[0])  # what the trainer computes, bit for bit
    assert not hasattr(output, "next_token_top_logprobs_val")
    assert not hasattr(output, "next_token_token_ids_logprobs_val")


def test_the_most_probable_tokens_have_the_bits_of_the_sampled_one() -> None:
    """`lm-eval` looks whether a token's log-probability is the greatest of those beside it. Given ones are reported for
    the rows that ask."""
    logits, output, tokens = sample(True, [0, 2, 3], [[3, 1], None, [36]])
    given = output.next_token_token_ids_logprobs_val
    assert [len(row) for row in given] == [2, 0, 1]
    assert output.next_token_token_ids_logprobs_idx == [[3, 1], [], [36]]
    torch.testing.assert_close(given[0].double(), expected(logits[0], 1.0)[[3, 1]], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(given[2].double(), expected(logits[2], 2.5)[[36]], rtol=1e-6, atol=1e-6)
    values, ids = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
    assert [len(row) for row in values] == [len(row) for row in ids] == [0, 2, 3]
    for row in (1, 2):
        assert ids[row].equal(logits[row].topk(row + 1).indices)
        alone = [ops.token_logprobs(logits[row : row + 1], token[None], TEMPERATURES[row])[0][0] for token in ids[row]]
        assert values[row].equal(torch.stack(alone))
    assert tokens[2] == ids[2][0] and output.next_token_logprobs[2] == values[2].max(), "the greedy row"


@pytest.mark.parametrize("top", [[0, 0], [2, 0], [1, 3]])
@pytest.mark.parametrize("chunk", [4, 7, 100])
def test_prompts_are_scored_in_chunks_by_sglangs_own_walk(chunk: int, top: list[int]) -> None:
    """Two sequences of 9 and 6 rows; the first row of the second predicts no token that is asked for."""
    processor = pytest.importorskip("sglang.srt.layers.logprob_processor").InputLogprobProcessor()
    processor.enable_logprobs_chunk, processor.logprobs_chunk_size = True, chunk
    generator = torch.Generator().manual_seed(1)
    # Whole numbers, so that the products are exact in any order of addition.
    states, head = (torch.randint(-3, 4, (n, 8), generator=generator).float() for n in (15, VOCABULARY))
    rows = torch.tensor([*range(9), *range(10, 15)])
    tokens = torch.randint(0, VOCABULARY, (len(rows),), generator=generator)
    asked = {"extend_return_top_logprob": any(top), "top_logprobs_nums": top, "extend_token_ids_logprob": False}
    lengths = {"extend_logprob_pruned_lens_cpu": [9, 5], "extend_input_logprob_token_ids_gpu": tokens}
    metadata = SimpleNamespace(**asked, **lengths)
    indices = {"sample_indices": torch.tensor([8, 14]), "input_logprob_indices": rows, "pruned_states": states}
    walk = {"token_to_seq_idx": [0] * 9 + [1] * 6, "lm_head": head, "logits_metadata": metadata}
    walk |= {"get_logits_fn": lambda states, head, *_, **__: states @ head.t(), "skip_chunking_for_dp_attn": False}
    result, sampled = sampling.of_prompts(type(processor).forward, processor, **indices, **walk)
    logits = states @ head.t()
    assert torch.equal(sampled, logits[[8, 14]])
    reference = expected(logits)[rows, tokens]
    torch.testing.assert_close(result.token_logprobs.double(), reference, rtol=1e-6, atol=1e-6)
    assert torch.equal(result.token_logprobs, ops.token_logprobs(logits[rows], tokens, 1.0)[0])
    if not any(top):
        assert result.top_logprobs_val is None
        return
    flat = iter(range(len(rows)))
    for k, values, ids in zip(top, result.top_logprobs_val, result.top_logprobs_idx):
        for value, token in zip(values, ids):
            row = logits[rows[next(flat)]][None]
            assert token == row.topk(k).indices[0].tolist()
            assert value == [float(ops.token_logprobs(row, torch.tensor([each]), 1.0)[0]) for each in token]
    assert next(flat, None) is None


def test_under_top_p_everything_is_of_what_is_left_but_for_greedy_requests() -> None:
    top_p = torch.tensor([0.99, 1.0, 0.6])
    top_k = torch.tensor([1 << 30, 5, 1])
    cut = {"top_ps": top_p, "top_ks": top_k, "need_top_p_sampling": True, "return_sampling_masks": [True] * 3}
    logits, output, tokens = sample(True, [30, 0, 2], [None, [0, 1], None], **cut)
    supports = output.next_token_sampling_mask_idx
    assert 1 < len(supports[0]) < VOCABULARY and len(supports[1]) == 5 and len(supports[2]) == VOCABULARY
    assert sorted(logits[1].topk(5).indices.tolist()) == supports[1]
    for row, (temperature, support) in enumerate(zip(TEMPERATURES, supports, strict=True)):
        at = support.index(int(tokens[row]))
        reference = expected(logits[row, support], temperature)[at]
        assert output.next_token_logprobs[row] == pytest.approx(float(reference), rel=1e-6, abs=1e-6)
    assert output.next_token_sampling_logprobs == output.next_token_logprobs.tolist()
    (likely, _, _), (ids, _, _) = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
    assert (likely == sampling.NEVER).sum() == 30 - len(supports[0])
    assert set(ids[: len(supports[0])].tolist()) == set(supports[0])
    assert output.next_token_token_ids_logprobs_val[1].isfinite().all()
    plain = sample(True, [0, 0, 0], [None, None, None])[1]
    assert output.next_token_logprobs[2] == plain.next_token_logprobs[2]
