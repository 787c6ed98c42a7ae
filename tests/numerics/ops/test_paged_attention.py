"""Attention over a paged cache against attention over each sequence alone; see also `tests/rollout/plugin/test_ops`."""

import torch

from numerics import ops


def test_new_tokens_of_sequences_that_lie_scattered_in_a_cache():
    """One sequence has nothing new, one no keys, and there is a token more than the sequences have."""
    torch.manual_seed(0)
    lengths, new = [5, 140, 9, 0], [2, 130, 0, 1]
    k_cache, v_cache = torch.full((2, 300, 2, 32), torch.nan).bfloat16()
    slots, table = torch.randperm(300), torch.randint(0, 300, (6, 200), dtype=torch.int32)
    requests = torch.tensor([4, 0, 2, 5])
    q = torch.randn(sum(new) + 1, 4, 32).bfloat16()
    out = ops.paged_attention(q, k_cache, v_cache, table, requests, torch.tensor(new), torch.tensor(lengths), 0.1)
    assert out[:132].isnan().any() and not out[132:].any()

    expected = []
    for request, length, count, queries in zip(requests, lengths, new, q[:132].split([2, 130, 0])):
        own, slots = slots[:length], slots[length:]
        table[request, :length] = own.int()
        k_cache[own], v_cache[own] = torch.randn(2, length, 2, 32).bfloat16()
        positions = torch.arange(length - count, length)[None]
        expected.append(ops.attention(queries[None], k_cache[own][None], v_cache[own][None], positions, 0.1)[0])
    out = ops.paged_attention(q, k_cache, v_cache, table, requests, torch.tensor(new), torch.tensor(lengths), 0.1)
    assert torch.equal(out[:132], torch.cat(expected)) and not out[132:].any()
