"""Attention over SGLang's paged cache equals the whole sequence's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.kv import KVFormat
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin.tokens import Paged

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
    kv: KVFormat
    req_to_token: Tensor
    requests: Tensor

    def rows(self, starts: list[int], stops: list[int]) -> Tensor:
        """Indices into q of tokens starts[i] to stops[i] of each sequence."""
        offsets = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
        spans = zip(offsets, starts, stops, strict=True)
        return torch.cat([torch.arange(o + a, o + b) for o, a, b in spans])


@pytest.fixture(scope="module", params=[{}, {"kv": "fp8", "key_scale": 2.0, "value_scale": 0.25}], ids=["bf16", "fp8"])
def cache(request: pytest.FixtureRequest) -> Cache:
    """In an engine of numerics with these keys."""
    kv = NumericsConfig(spec=QuantSpec.preset("bf16"), **request.param).kv_format
    torch.manual_seed(0)
    slots = torch.randperm(2 * sum(LENGTHS))
    k_cache = torch.full((len(slots), KEY_HEADS, DIM), torch.nan, dtype=torch.bfloat16)
    v_cache = k_cache.clone()
    requests = torch.randperm(len(LENGTHS) + 3)[: len(LENGTHS)]
    # Behind a sequence's end the table points anywhere.
    table = torch.randint(0, len(slots), (len(LENGTHS) + 3, max(LENGTHS) + 5), dtype=torch.int32)
    queries, expected, used = [], [], 0
    for row, length in zip(requests.tolist(), LENGTHS):
        q, k, v = (torch.randn(1, length, heads, DIM).bfloat16() for heads in (HEADS, KEY_HEADS, KEY_HEADS))
        own = slots[used : used + length]
        used += length
        table[row, :length] = own.int()
        k, v = kv.keys(k), kv.values(v)
        k_cache[own], v_cache[own] = k[0], v[0]
        queries.append(q[0])
        whole = ops.attention(q, k, v, torch.arange(length)[None], SCALE * kv.key_scale)
        expected.append(kv.result(whole)[0])
    k_cache, v_cache = k_cache.to(kv.dtype), v_cache.to(kv.dtype)
    return Cache(torch.cat(queries), torch.cat(expected), k_cache, v_cache, kv, table, requests)


def rounds(chunk: int) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Each extends every sequence that is not complete by up to `chunk` tokens, more for later sequences: where it
    begins and ends in all, and which sequences it extends."""
    done = [0] * len(LENGTHS)
    while done != list(LENGTHS):
        stops = [min(length, start + chunk + 3 * i) for i, (start, length) in enumerate(zip(done, LENGTHS))]
        yield done, stops, [i for i in range(len(LENGTHS)) if stops[i] > done[i]]
        done = stops


class Pool:
    """SGLang's pool of one layer: keys and values by slot."""

    def __init__(self, cache: Cache) -> None:
        self.k, self.v = (torch.full(x.shape, torch.nan).to(x.dtype) for x in (cache.k_cache, cache.v_cache))

    def set_kv_buffer(self, layer: Any, slots: Any, k: Tensor, v: Tensor) -> None:
        self.k[slots.loc], self.v[slots.loc] = k.to(self.k.dtype), v.to(self.v.dtype)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v


def attended(cache: Cache, pool: Pool, starts: list[int], stops: list[int], active: list[int], decodes: bool) -> Tensor:
    """Attention of tokens starts to stops of the active sequences, whose keys and values are put into slots."""
    slots = torch.cat([cache.req_to_token[cache.requests[i], starts[i] : stops[i]] for i in active]).long()
    table = SimpleNamespace(req_to_token=cache.req_to_token)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode_or_idle=lambda: decodes), out_cache_loc=slots,
        req_pool_indices=cache.requests[active], seq_lens=torch.tensor([stops[i] for i in active], dtype=torch.int32),
        extend_seq_lens=torch.tensor([stops[i] - starts[i] for i in active], dtype=torch.int32),
    )  # fmt: skip
    paged = Paged(batch, SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=table), torch.zeros(0))
    k, v = (x[slots].bfloat16() for x in (cache.k_cache, cache.v_cache))
    keys, values = k * cache.kv.key_scale, v * cache.kv.value_scale
    rows, scale = cache.rows(starts, stops), SCALE * cache.kv.key_scale
    return cache.kv.result(paged.attend(0, cache.q[rows], keys, values, scale, cache.kv, None))


@pytest.mark.parametrize("chunk", [17, 96, 1000])
def test_prefill_in_chunks_equals_the_whole(cache: Cache, chunk: int) -> None:
    pool = Pool(cache)
    for done, stops, active in rounds(chunk):
        output = attended(cache, pool, done, stops, active, decodes=False)
        assert torch.equal(output, cache.expected[cache.rows(done, stops)])


def test_a_decoded_token_equals_the_last_of_the_whole(cache: Cache) -> None:
    pool, every = Pool(cache), list(range(len(LENGTHS)))
    last = [length - 1 for length in LENGTHS]
    attended(cache, pool, [0] * len(LENGTHS), last, every, decodes=False)
    output = attended(cache, pool, last, list(LENGTHS), every, decodes=True)
    assert torch.equal(output, cache.expected[cache.rows(last, list(LENGTHS))])
