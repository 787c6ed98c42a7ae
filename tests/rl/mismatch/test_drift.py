"""Drift of older tokens, apart from what is fresh, on cases worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fp8rl.rl.mismatch import drift as drift_module
from fp8rl.rl.mismatch.drift import NOT_DRAWN, drift_metrics, redraw_metrics, router_agreement, tokens_by_age
from fp8rl.rl.record.metrics import describe

LN2 = math.log(2)


def drift(d: list[float], versions: list[int], version: int) -> dict[str, float]:
    train = torch.tensor([d], dtype=torch.float64)
    mask = torch.ones_like(train, dtype=torch.bool)
    return drift_metrics(train, torch.zeros_like(train), mask, torch.tensor([versions]), version)


def test_by_hand() -> None:
    # Fresh tokens (version 7) and one that is not finite are left out. mean(rho - 1 - d) over d = ln 2, -ln 2, 2 ln 2:
    # (2 + 1/2 + 4 - 3 - 2 ln 2) / 3. ESS: (2 + 1/2 + 4)^2 / (3 (4 + 1/4 + 16)).
    found = drift([9.0, LN2, -LN2, math.nan, 2 * LN2], [7, 6, 6, 6, 4], 7)
    assert found == {
        "drift/tokens": 3.0,
        "drift/logprob_abs_diff_mean": pytest.approx(4 * LN2 / 3),
        "drift/logprob_abs_diff_max": pytest.approx(2 * LN2),
        "drift/k1_kl": pytest.approx(-2 * LN2 / 3),
        "drift/ess": pytest.approx(6.5**2 / (3 * 20.25)),
        "drift/k3_kl": pytest.approx((3.5 - 2 * LN2) / 3),
        "drift/tokens_age_1": 2.0,
        "drift/abs_diff_mean_age_1": pytest.approx(LN2),
        "drift/tokens_age_3": 1.0,
        "drift/abs_diff_mean_age_3": pytest.approx(2 * LN2),
    }


def test_very_old_tokens_share_one_name() -> None:
    found = drift([1.0, 3.0, 4.0], [92, 3, 99], 100)
    assert found["drift/tokens_age_8"] == 2 and found["drift/abs_diff_mean_age_8"] == 2.0
    assert found["drift/tokens_age_1"] == 1


def test_without_older_tokens_there_is_no_drift() -> None:
    assert drift([1.0, math.nan], [7, 6], 7) == {}


def test_prompts_do_not_drift() -> None:
    train, versions = torch.ones(1, 3), torch.tensor([[0, 4, 5]])
    mask = torch.tensor([[False, True, True]])
    assert drift_metrics(train, torch.zeros(1, 3), mask, versions, 5)["drift/tokens"] == 1


def test_tokens_are_counted_by_age() -> None:
    assert tokens_by_age(torch.tensor([5, 5, 3, -40]), 5) == {0: 2, 2: 1, 8: 1}


TOKENS = torch.tensor([[9, 4, 5, 6], [9, 9, 7, 8], [9, 1, 2, 3]])
MASK = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0]]).bool()


def test_the_fraction_is_over_the_sampled_tokens_that_were_drawn_again() -> None:
    draws = torch.tensor([[NOT_DRAWN, 4, 5, 0], [NOT_DRAWN, 3, 7, 8], [NOT_DRAWN] * 4])
    assert redraw_metrics(draws, TOKENS, MASK) == {"mismatch/redraw_frac": 0.8, "mismatch/redraw_tokens": 5.0}


def test_without_a_draw_there_is_no_metric() -> None:
    assert redraw_metrics(torch.full_like(TOKENS, NOT_DRAWN), TOKENS, MASK) == {}


def routes(*values: list[list[list[int]]]) -> torch.Tensor:
    """int16 [B, S, L, K]."""
    return torch.tensor(values, dtype=torch.int16)


def everything(values: torch.Tensor) -> torch.Tensor:
    return torch.ones(values.shape[:2], dtype=torch.bool)


def test_routes_by_hand() -> None:
    # One row, three tokens, two layers, top-2. Token 0: layer 0 shares one of two, layer 1 both, in another order.
    # Token 1: equal. Token 2: nothing in common in layer 0, one in layer 1.
    train = routes([[[0, 1], [4, 5]], [[2, 3], [6, 7]], [[0, 1], [0, 1]]])
    rollout = routes([[[1, 2], [5, 4]], [[2, 3], [6, 7]], [[2, 3], [1, 7]]])
    assert router_agreement(train, rollout, everything(train)) == {
        "mismatch/router_pairs": 6.0,
        "mismatch/router_tokens": 3.0,
        "mismatch/router_unknown_pairs": 0.0,
        "mismatch/router_agreement": pytest.approx((1 + 2 + 2 + 2 + 0 + 1) / 12),
        "mismatch/router_agreement_layer_0": pytest.approx(3 / 6),
        "mismatch/router_agreement_layer_1": pytest.approx(5 / 6),
        "mismatch/router_differ_frac": pytest.approx(3 / 6),
        "mismatch/router_token_differ_frac": pytest.approx(2 / 3),
    }


def test_order_does_not_matter() -> None:
    train = torch.stack([torch.randperm(16)[:4] for _ in range(60)]).view(2, 10, 3, 4).short()
    metrics = router_agreement(train, train.flip(-1), everything(train))
    assert metrics["mismatch/router_agreement"] == metrics["mismatch/router_agreement_layer_2"] == 1.0
    assert metrics["mismatch/router_differ_frac"] == metrics["mismatch/router_token_differ_frac"] == 0.0


def test_unknown_pairs_are_left_out_and_counted() -> None:
    # Token 0 is known in layer 1 only, token 1 nowhere, token 2 everywhere but differs in layer 0; token 3 is masked.
    train = routes([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    rollout = routes([[[-1, -1], [2, 3]], [[-1, -1], [-1, -1]], [[1, 9], [2, 3]], [[8, 9], [8, 9]]])
    mask = torch.tensor([[True, True, True, False]])
    assert router_agreement(train, rollout, mask) == {
        "mismatch/router_pairs": 3.0,
        "mismatch/router_tokens": 2.0,
        "mismatch/router_unknown_pairs": 3.0,
        "mismatch/router_agreement": pytest.approx(5 / 6),
        "mismatch/router_agreement_layer_0": 0.5,
        "mismatch/router_agreement_layer_1": 1.0,
        "mismatch/router_differ_frac": pytest.approx(1 / 3),
        "mismatch/router_token_differ_frac": 0.5,
    }
    assert router_agreement(rollout, train, mask)["mismatch/router_pairs"] == 3.0, "whichever side does not know"


def test_both_sides_unknown_is_no_agreement() -> None:
    nothing = torch.full((1, 2, 3, 2), -1, dtype=torch.int16)
    assert router_agreement(nothing, nothing, everything(nothing)) == {
        "mismatch/router_pairs": 0.0,
        "mismatch/router_tokens": 0.0,
        "mismatch/router_unknown_pairs": 6.0,
    }
    masked = router_agreement(nothing, nothing, torch.zeros(1, 2, dtype=torch.bool))
    assert masked["mismatch/router_unknown_pairs"] == 0.0


@pytest.mark.parametrize("chunk", [1, 100, 1 << 22])
def test_against_sets_and_in_chunks_of_any_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift_module, "_CHUNK", chunk)
    generator = np.random.default_rng(0)
    batch, width, layers, top_k = 7, 9, 5, 4
    train = np.stack([generator.permutation(8)[:top_k] for _ in range(batch * width * layers)])
    train = train.reshape(batch, width, layers, top_k).astype(np.int16)
    rollout = np.where(generator.random((batch, width, layers, 1)) < 0.8, train[..., ::-1], (train + 1) % 8)
    rollout[2, 3] = rollout[4, :, 1] = -1
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
    metrics = router_agreement(torch.from_numpy(train), torch.from_numpy(rollout), torch.from_numpy(mask))
    assert metrics == pytest.approx(expected, rel=1e-12)
    assert 0 < metrics["mismatch/router_agreement"] < 1 and all(describe(name) for name in metrics)


def test_shapes_that_do_not_fit_are_refused() -> None:
    good = torch.zeros(2, 3, 1, 2, dtype=torch.int16)
    for other, mask in [(good[:, :2], everything(good)), (good, everything(good)[:1])]:
        with pytest.raises(ValueError, match="expected \\[B, S, L, K\\]"):
            router_agreement(good, other, mask)
