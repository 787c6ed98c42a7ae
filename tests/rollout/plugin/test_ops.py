"""Attention over SGLang's paged cache against the shared op on the whole sequence: bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from numerics import ops
from rollout.plugin.ops import attention_decode, attention_extend

HEADS, KEY_HEADS, DIM = 4, 2, 32
LENGTHS = (1, 7, 64, 129, 300, 301)
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Cache:
    """Sequences whose keys and values lie scattered over the slots of one cache, other slots holding NaN.

    q [total, heads, D] of all sequences end to end, and what attention over each whole sequence gives.
    """

    q: Tensor
    expected: Tensor
    k_cache: Tensor
    v_cache: Tensor
    req_to_token: Tensor
    requests: Tensor

    def rows(self, starts: list[int], stops: list[int]) -> Tensor:
        """Indices into q of tokens starts[i] to stops[i] of each sequence."""
        offsets = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
        spans = zip(offsets, starts, stops, strict=True)
        return torch.cat([torch.arange(o + a, o + b) for o, a, b in spans])


@pytest.fixture(scope="module")
def cache() -> Cache:
    torch.manual_seed(0)
    slots = torch.randperm(2 * sum(LENGTHS))
    k_cache = torch.full((len(slots), KEY_HEADS, DIM), torch.nan, dtype=torch.bfloat16)
    v_cache = k_cache.clone()
    requests = torch.randperm(len(LENGTHS) + 3)[: len(LENGTHS)]
    # Behind a sequence's end the table points anywhere.
    table = torch.randint(0, len(slots), (len(LENGTHS) + 3, max(LENGTHS) + 5), dtype=torch.int32)
    queries, expected, used = [], [], 0
    for request, length in zip(requests.tolist(), LENGTHS):
        q, k, v = (torch.randn(1, length, heads, DIM).bfloat16() for heads in (HEADS, KEY_HEADS, KEY_HEADS))
        own = slots[used : used + length]
        used += length
        table[request, :length] = own.int()
        k_cache[own], v_cache[own] = k[0], v[0]
        queries.append(q[0])
        expected.append(ops.attention(q, k, v, torch.arange(length)[None], SCALE)[0])
    return Cache(torch.cat(queries), torch.cat(expected), k_cache, v_cache, table, requests)


@pytest.mark.parametrize("chunk", [17, 96, 1000])
def test_prefill_in_chunks_equals_the_whole(cache: Cache, chunk: int) -> None:
    """Each round extends every sequence that is not complete by up to `chunk` tokens, more for later sequences."""
    done = [0] * len(LENGTHS)
    while done != list(LENGTHS):
        stops = [min(length, start + chunk + 3 * i) for i, (start, length) in enumerate(zip(done, LENGTHS))]
        active = [i for i in range(len(LENGTHS)) if stops[i] > done[i]]
        rows = cache.rows(done, stops)
        output = torch.full((len(rows), HEADS, DIM), torch.nan, dtype=torch.bfloat16)
        attention_extend(
            None,
            cache.q[rows],
            output,
            cache.k_cache,
            cache.v_cache,
            cache.req_to_token,
            cache.requests[active],
            torch.tensor([stops[i] for i in active]),
            torch.tensor([done[i] for i in active]),
            torch.tensor([stops[i] - done[i] for i in active]),
            scaling=SCALE,
        )
        assert torch.equal(output, cache.expected[rows])
        done = stops


def test_a_decoded_token_equals_the_last_of_the_whole(cache: Cache) -> None:
    lengths = list(LENGTHS)
    rows = cache.rows([length - 1 for length in lengths], lengths)
    output = torch.full((len(rows), HEADS, DIM), torch.nan, dtype=torch.bfloat16)
    attention_decode(
        None,
        cache.q[rows],
        output,
        cache.k_cache,
        cache.v_cache,
        cache.req_to_token,
        cache.requests,
        torch.tensor(lengths),
        scaling=SCALE,
    )
    assert torch.equal(output, cache.expected[rows])
