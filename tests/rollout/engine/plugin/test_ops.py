"""The shared ops in the shape of SGLang's methods. Attention over its paged cache equals the whole sequence's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.kv import KVFormat
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin import state
from fp8rl.rollout.engine.plugin.families import attention
from fp8rl.rollout.engine.plugin.families.attention import attention_backend_extend, attention_decode, attention_extend
from fp8rl.rollout.engine.plugin.families.mlp import fused_topk
from fp8rl.rollout.engine.plugin.state import Normed

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
def cache(request: pytest.FixtureRequest) -> Iterator[Cache]:
    """In an engine of numerics with these keys."""
    numerics = NumericsConfig(spec=QuantSpec.preset("bf16"), **request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "_state", None)
        state.configure(numerics)
        yield made(numerics.kv_format)


def made(kv: KVFormat) -> Cache:
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


def attended(function: Any, cache: Cache, rows: Tensor, *of_requests: Tensor) -> Tensor:
    """What an extend or a decode on a CPU writes for these rows of q."""
    output = torch.full((len(rows), HEADS, DIM), torch.nan, dtype=torch.bfloat16)
    held = cache.k_cache, cache.v_cache, cache.req_to_token
    function(None, cache.q[rows], output, *held, *of_requests, scaling=SCALE)
    return output


@pytest.mark.parametrize("chunk", [17, 96, 1000])
def test_prefill_in_chunks_equals_the_whole(cache: Cache, chunk: int) -> None:
    for done, stops, active in rounds(chunk):
        rows = cache.rows(done, stops)
        ends, begins = (torch.tensor([at[i] for i in active]) for at in (stops, done))
        output = attended(attention_extend, cache, rows, cache.requests[active], ends, begins, ends - begins)
        assert torch.equal(output, cache.expected[rows])


def test_a_decoded_token_equals_the_last_of_the_whole(cache: Cache) -> None:
    rows = cache.rows([length - 1 for length in LENGTHS], list(LENGTHS))
    output = attended(attention_decode, cache, rows, cache.requests, torch.tensor(LENGTHS))
    assert torch.equal(output, cache.expected[rows])


class Pool:
    """SGLang's pool of one layer: keys and values by slot."""

    def __init__(self, cache: Cache) -> None:
        self.k, self.v = (torch.full(x.shape, torch.nan).to(x.dtype) for x in (cache.k_cache, cache.v_cache))

    def set_kv_buffer(self, layer: Any, slots: Any, k: Tensor, v: Tensor) -> None:
        """With the hook, if it is there."""
        store = Pool.store if self.k.dtype == torch.bfloat16 else partial(attention.set_kv_buffer, Pool.store)
        store(self, layer, slots, cache_k=k, cache_v=v)

    def store(self, layer: Any, slots: Any, cache_k: Tensor, cache_v: Tensor) -> None:
        self.k[slots.loc], self.v[slots.loc] = cache_k.to(self.k.dtype), cache_v.to(self.v.dtype)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v


def backend_and_layer(cache: Cache) -> tuple[Any, Any]:
    """What the methods of SGLang's Triton backend find on a GPU."""
    backend = SimpleNamespace(
        token_to_kv_pool=Pool(cache),
        req_to_token_pool=SimpleNamespace(req_to_token=cache.req_to_token),
        forward_metadata=SimpleNamespace(swa_out_cache_loc=None, out_cache_loc_full_physical=None),
    )
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM, scaling=SCALE, sliding_window_size=-1, logit_cap=0.0
    )
    return backend, layer


def batch(cache: Cache, starts: list[int], stops: list[int], active: list[int]) -> tuple[Any, Tensor, Tensor]:
    """A batch of SGLang's that extends the active sequences, and the new keys and values, whose slots it names."""
    slots = torch.cat([cache.req_to_token[cache.requests[i], starts[i] : stops[i]] for i in active]).long()
    lengths = torch.tensor([stops[i] for i in active], dtype=torch.int32)
    new = torch.tensor([stops[i] - starts[i] for i in active], dtype=torch.int32)
    described = SimpleNamespace(
        out_cache_loc=slots, req_pool_indices=cache.requests[active], seq_lens=lengths, extend_seq_lens=new
    )
    k, v = (x[slots].bfloat16() for x in (cache.k_cache, cache.v_cache))
    return described, k * cache.kv.key_scale, v * cache.kv.value_scale


@pytest.mark.parametrize("chunk", [17, 96, 1000])
def test_the_gpu_backend_stores_keys_and_attends_in_chunks(cache: Cache, chunk: int) -> None:
    backend, layer = backend_and_layer(cache)
    for done, stops, active in rounds(chunk):
        rows = cache.rows(done, stops)
        described, k, v = batch(cache, done, stops, active)
        found = attention_backend_extend(backend, cache.q[rows].flatten(1), k, v, layer, described)
        assert torch.equal(found, cache.expected[rows].flatten(1))


def test_quantized_rows_belong_to_the_norms_result_as_it_was() -> None:
    x, rows = torch.randn(3, 8), object()
    kept = Normed.of(x, rows)
    assert kept.rows_of(x) is rows and kept.rows_of(x.view(-1, 8)) is rows
    for other in (x.clone(), x[:2], x[1:], x.view(8, 3), x.view(torch.int32), x.t()):
        assert kept.rows_of(other) is None
    x.add_(1)
    assert kept.rows_of(x) is None


@pytest.mark.parametrize(("name", "value"), [("sliding_window_size", 64), ("logit_cap", 30.0)])
def test_other_attention_is_refused(cache: Cache, name: str, value: float) -> None:
    backend, layer = backend_and_layer(cache)
    setattr(layer, name, value)
    described, k, v = batch(cache, [0], [1], [0])
    with pytest.raises(NotImplementedError, match="more than a causal mask"):
        attention_backend_extend(backend, cache.q[:1].flatten(1), k, v, layer, described)


def test_the_gpu_router_takes_nothing_more_than_the_op() -> None:
    for change in ({"num_fused_shared_experts": 1}, {"scoring_func": "sigmoid"}, {"routed_scaling_factor": 2.5}):
        with pytest.raises(NotImplementedError, match="more than a softmax"):
            fused_topk(torch.zeros(7, 4), torch.zeros(7, 16).bfloat16(), 4, True, **change)
