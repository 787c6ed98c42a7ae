"""Score centering against its definition over the whole vocabulary, in float64; and where both sides agree."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.rl.algorithms.grpo import Grpo
from fp8rl.rollout.config import RolloutSection
from fp8rl.trainer.step.batch import LIKELY_LOGPROBS, OWN_LIKELY, TokenBatch
from tests.support.experiments import experiment

ROWS, WIDTH, VOCABULARY = 3, 6, 20
WEIGHTS: list[dict[str, Any]] = [
    {"tis_cap": None}, {"tis_cap": 1.3}, {"rejection": {"name": "icepop", "low": 0.7, "high": 1.4}},
    {"rejection": {"name": "icepop", "low": 0.7, "high": 1.4}, "tis_cap": 1.1},
]  # fmt: skip


def weight(ratio: Tensor, settings: dict[str, Any]) -> Tensor:
    """As published: 1, truncated, masked, or both."""
    if settings.get("tis_cap") is None and "rejection" not in settings:
        return torch.ones_like(ratio)
    kept = ratio if settings.get("tis_cap") is None else ratio.clamp(max=settings["tis_cap"])
    return torch.where((ratio < 0.7) | (ratio > 1.4), 0.0, kept) if "rejection" in settings else kept


def batch_of(logits: Tensor, engines: Tensor, k: int) -> tuple[TokenBatch, Tensor]:
    """A batch of sampled tokens, all but the first two of a row, and the trainer's log-probabilities of them."""
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (ROWS, WIDTH), generator=draw)
    mask = (torch.arange(WIDTH) > 1).expand(ROWS, WIDTH)
    log_p, log_q = logits.log_softmax(-1), engines.log_softmax(-1)
    ids = log_q.topk(k, -1).indices
    at = tokens.unsqueeze(-1)
    fields = {
        "rollout_logprobs": log_q.gather(-1, at).squeeze(-1),
        "advantages": torch.where(mask, -torch.rand(ROWS, WIDTH, generator=draw), 0.0),
        LIKELY_LOGPROBS: log_q.gather(-1, ids),
        OWN_LIKELY: log_p.gather(-1, ids),
    }
    lengths = torch.full((ROWS,), WIDTH)
    return TokenBatch(tokens, lengths, mask, fields=fields), log_p.gather(-1, at).squeeze(-1)


def trained(logits: Tensor, engines: Tensor, k: int, centered: bool, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    batch, logprobs = batch_of(leaf, engines, k)
    chosen = Grpo(**settings, centering=k if centered else None).resolved(RolloutSection())
    loss = chosen.objective(batch)(logprobs, torch.zeros_like(logprobs), batch).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def defined(logits: Tensor, engines: Tensor, k: int, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Each token's score less its expectation, summed over the whole vocabulary: beyond the k likeliest q is ρ p."""
    leaf = logits.double().requires_grad_()
    batch, _ = batch_of(logits, engines, k)
    log_p, q = leaf.log_softmax(-1), engines.double().log_softmax(-1).exp()
    p = log_p.detach().exp()
    likely = torch.zeros_like(q, dtype=torch.bool).scatter_(-1, q.topk(k, -1).indices, True)
    rho = (
        q.masked_fill(likely, 0.0).sum(-1, keepdim=True) / p.masked_fill(likely, 0.0).sum(-1, keepdim=True)
    ).nan_to_num(1.0)
    q = torch.where(likely, q, rho * p)
    at = batch.tokens.unsqueeze(-1)
    own = weight((p / q).gather(-1, at), settings).squeeze(-1)
    if k < VOCABULARY:  # the token that was drawn has the engine's own probability
        drawn = batch.fields["rollout_logprobs"].double().exp()
        own = weight(p.gather(-1, at).squeeze(-1) / drawn, settings)
    score = own * log_p.gather(-1, at).squeeze(-1) - (q * weight(p / q, settings) * log_p).sum(-1)
    losses = torch.where(batch.loss_mask, -batch.fields["advantages"].double() * score, 0.0)
    alpha = rho * weight(1 / rho, settings)
    terms = torch.where(likely, (q * weight(p / q, settings) - alpha * p) * log_p.detach(), 0.0).sum(-1)
    value = torch.where(batch.loss_mask, batch.fields["advantages"].double() * (terms - own), 0.0).sum()
    (gradient,) = torch.autograd.grad(losses.sum() / batch.loss_mask.sum(), leaf)
    return value / batch.loss_mask.sum(), gradient


@pytest.mark.parametrize("settings", WEIGHTS, ids=str)
@pytest.mark.parametrize("k", [1, 4, VOCABULARY])
def test_loss_and_gradient_are_those_of_the_definition_over_the_whole_vocabulary(
    k: int, settings: dict[str, Any]
) -> None:
    draw = torch.Generator().manual_seed(k)
    logits = 2 * torch.randn(ROWS, WIDTH, VOCABULARY, generator=draw)
    engines = logits + 0.4 * torch.randn(logits.shape, generator=draw)
    found, expected = trained(logits, engines, k, True, settings), defined(logits, engines, k, settings)
    assert all((one.double() - other).abs().max() <= 1e-6 for one, other in zip(found, expected, strict=True))
    plain = trained(logits, engines, k, False, settings)[1]
    assert (plain - found[1]).abs().max() > 1e-4, "it does something where the sides differ"


@pytest.mark.parametrize("settings", WEIGHTS, ids=str)
@pytest.mark.parametrize("k", [1, 4, VOCABULARY])
def test_where_both_sides_agree_it_changes_no_bit(k: int, settings: dict[str, Any]) -> None:
    logits = 2 * torch.randn(ROWS, WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(7))
    for one, other in zip(*(trained(logits, logits, k, centered, settings) for centered in (True, False)), strict=True):
        assert torch.equal(one, other) and one.any()


def test_a_token_that_is_not_used_or_whose_sequence_is_vetoed_adds_nothing() -> None:
    logits = torch.randn(ROWS, WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(8))
    batch, logprobs = batch_of(logits, logits + 0.5, 4)
    batch.fields["rollout_logprobs"][1] += 20  # by far below the veto
    batch = replace(batch, fields={**batch.fields, OWN_LIKELY: batch.fields[OWN_LIKELY].clone().requires_grad_()})
    batch.fields["rollout_logprobs"][2, 3] = -torch.inf
    chosen = Grpo(centering=4, veto=1e-4, tis_cap=None).resolved(RolloutSection())
    chosen.objective(batch)(logprobs, torch.zeros_like(logprobs), batch).loss.backward()
    gradient = batch.fields[OWN_LIKELY].grad
    assert gradient is not None and gradient.isfinite().all()
    assert not gradient[1].any() and not gradient[2, 3].any() and not gradient[:, :2].any()


def test_the_ratio_of_older_tokens_is_computed_anew() -> None:
    stale = experiment(algorithm={"name": "grpo", "centering": 8}, rollout={"staleness": 1})
    assert stale.algorithm.ratio == "recompute" and "scores centred over 8 tokens" in stale.formula
    assert Grpo.model_validate({"ratio": "on_policy"}).ratio == "recompute", "as old specs have it"
