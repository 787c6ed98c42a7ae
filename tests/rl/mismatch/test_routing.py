from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8rl.rl.guard.scored_batch import router_metrics
from fp8rl.rl.record.metrics import describe


def test_both_sides_unknown_is_no_agreement() -> None:
    nothing = torch.full((1, 2, 3, 2), -1, dtype=torch.int16)
    assert router_metrics(nothing, nothing, torch.ones(1, 2, dtype=torch.bool)) == {
        "mismatch/router_pairs": 0.0,
        "mismatch/router_tokens": 0.0,
        "mismatch/router_unknown_pairs": 6.0,
    }
    masked = router_metrics(nothing, nothing, torch.zeros(1, 2, dtype=torch.bool))
    assert masked["mismatch/router_unknown_pairs"] == 0.0


@pytest.mark.parametrize("chunk", [1, 100, 1 << 22])
def test_against_sets_and_in_chunks_of_any_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown pairs are left out and counted."""
    monkeypatch.setattr("fp8rl.rl.guard.scored_batch._CHUNK", chunk)
    generator = np.random.default_rng(0)
    batch, width, layers, top_k = 7, 9, 5, 4
    train = np.stack([generator.permutation(8)[:top_k] for _ in range(batch * width * layers)])
    train = train.reshape(batch, width, layers, top_k).astype(np.int16)
    rollout = np.where(generator.random((batch, width, layers, 1)) < 0.8, train[..., ::-1], (train + 1) % 8)
    rollout[2, 3] = rollout[4, :, 1] = train[5, 1:6, 2] = -1  # whichever side does not know
    rollout = rollout.astype(np.int16)
    mask = generator.random((batch, width)) < 0.7

    pairs, differing, tokens, differing_tokens, unknown = [], 0, 0, 0, 0
    for b, t in zip(*np.nonzero(mask)):
        chosen = [(set(train[b, t, i]), set(rollout[b, t, i])) for i in range(layers)]
        known = [(i, a, r) for i, (a, r) in enumerate(chosen) if -1 not in a | r]
        unknown += layers - len(known)
        pairs += [(i, len(a & r) / top_k) for i, a, r in known]
        differing += sum(a != r for _, a, r in known)
        tokens += bool(known)
        differing_tokens += any(a != r for _, a, r in known)
    expected = {
        "mismatch/router_pairs": len(pairs),
        "mismatch/router_tokens": tokens,
        "mismatch/router_unknown_pairs": unknown,
        "mismatch/router_agreement": np.mean([share for _, share in pairs]),
        "mismatch/router_differ_frac": differing / len(pairs),
        "mismatch/router_token_differ_frac": differing_tokens / tokens,
    }
    for layer in range(layers):
        of_layer = [share for i, share in pairs if i == layer]
        expected[f"mismatch/router_agreement_layer_{layer}"] = np.mean(of_layer)
    metrics = router_metrics(torch.from_numpy(train), torch.from_numpy(rollout), torch.from_numpy(mask))
    assert metrics == pytest.approx(expected, rel=1e-12)
    assert 0 < metrics["mismatch/router_agreement"] < 1 and all(describe(name) for name in metrics)
