"""Attention over SGLang's paged cache equals the whole sequence's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin.tokens import Paged
from tests.numerics.kernels.test_attention import SCALE, Sequences
from tests.support.kernels import DEVICE

LENGTHS = (1, 7, 64, 129, 300, 301)


@pytest.fixture(scope="module", params=[{}, {"kv": "fp8", "key_scale": 2.0, "value_scale": 0.25}], ids=["bf16", "fp8"])
def sequences(request: pytest.FixtureRequest) -> Sequences:
    """In the cache of an engine of numerics with these keys."""
    kv = NumericsConfig(spec=QuantSpec.preset("bf16"), **request.param).kv_format
    return Sequences(LENGTHS, 4, 2, 32, kv=kv)


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

    def __init__(self, sequences: Sequences) -> None:
        caches = sequences.k_cache, sequences.v_cache
        self.k, self.v = (torch.full(x.shape, torch.nan, device=DEVICE).to(x.dtype) for x in caches)

    def set_kv_buffer(self, layer: Any, slots: Any, k: Tensor, v: Tensor) -> None:
        self.k[slots.loc], self.v[slots.loc] = k.to(self.k.dtype), v.to(self.v.dtype)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v


def attended(
    sequences: Sequences, pool: Pool, starts: list[int], stops: list[int], active: list[int], decodes: bool
) -> tuple[Tensor, Tensor]:
    """Attention of tokens starts to stops of the active sequences, whose keys and values are put into slots; and what
    it should be."""

    def counts(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    slots = torch.cat([sequences.table[sequences.requests[i], starts[i] : stops[i]] for i in active]).long()
    table = SimpleNamespace(req_to_token=sequences.table)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode_or_idle=lambda: decodes), out_cache_loc=slots,
        req_pool_indices=sequences.requests[active], seq_lens=counts([stops[i] for i in active]),
        extend_seq_lens=counts([stops[i] - starts[i] for i in active]),
    )  # fmt: skip
    paged = Paged(batch, SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=table), torch.zeros(0))
    k, v = (x[slots].bfloat16() for x in (sequences.k_cache, sequences.v_cache))
    (queries, expected), kv = sequences.tokens(starts, stops), sequences.kv
    found = paged.attend(0, queries, k * kv.key_scale, v * kv.value_scale, SCALE * kv.key_scale, kv, None)
    return kv.result(found), expected


@pytest.mark.parametrize("chunk", [17, 96, 1000])
def test_prefill_in_chunks_equals_the_whole(sequences: Sequences, chunk: int) -> None:
    pool = Pool(sequences)
    for done, stops, active in rounds(chunk):
        assert torch.equal(*attended(sequences, pool, done, stops, active, decodes=False))


def test_a_decoded_token_equals_the_last_of_the_whole(sequences: Sequences) -> None:
    pool, every, last = Pool(sequences), list(range(len(LENGTHS))), [length - 1 for length in LENGTHS]
    attended(sequences, pool, [0] * len(LENGTHS), last, every, decodes=False)
    assert torch.equal(*attended(sequences, pool, last, list(LENGTHS), every, decodes=True))
