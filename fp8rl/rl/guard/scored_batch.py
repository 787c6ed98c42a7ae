"""One batch as both sides saw it: what the monitors measure, and what a capsule keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.rl.mismatch.logprobs import drift_metrics, logprob_metrics
from fp8rl.trainer.step.batch import Scored, TokenBatch

NOT_DRAWN = -1
"""The entry of `ScoredBatch.draws` at a token that the trainer did not draw again."""


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """A batch with the first scores of both sides, before anything is rejected or trained on."""

    batch: TokenBatch
    """The batch, with the field `rollout_logprobs`, and `routes` if the engine reported any."""
    versions: Tensor
    """int64 [B, S], the weight version that sampled each token; 0 where none was sampled."""
    version: int
    """The trainer's weight version when it scored the batch."""
    logprobs: Tensor
    """fp32 [B, S], the trainer's log-probabilities."""
    routes: Tensor | None = None
    """int16 [B, S, L, K], the trainer's own choice of experts; None without `batch.routes`."""
    draws: Tensor | None = None
    """int64 [B, S], the tokens that the trainer drew again; None without `batch.seeds`."""
    tis_cap: float = 2.0
    """The cap C that importance weights and clip fractions are measured with."""

    @classmethod
    def of(cls, batch: TokenBatch, versions: Tensor, version: int, scored: Scored, tis_cap: float) -> ScoredBatch:
        """Join a batch with the trainer's scores of it."""
        return cls(batch, versions, version, scored.logprobs, scored.routes, scored.draws, tis_cap)

    @property
    def fresh(self) -> Tensor:
        """bool [B, S], the tokens that the trainer's present weights have sampled, on which both sides must agree."""
        return self.batch.loss_mask & (self.versions == self.version)

    def metrics(self) -> dict[str, float]:
        batch, rollout = self.batch, self.batch.fields["rollout_logprobs"]
        metrics = logprob_metrics(self.logprobs, rollout, batch.loss_mask, tis_cap=self.tis_cap, fresh=self.fresh)
        if self.draws is not None:
            metrics |= redraw_metrics(self.draws, batch.tokens, self.fresh)
        if batch.routes is not None and self.routes is not None:
            metrics |= router_metrics(self.routes, batch.routes, batch.real_tokens())
        return metrics

    def drift(self) -> dict[str, float]:
        """The `drift/...` metrics of tokens that older weights have sampled."""
        rollout = self.batch.fields["rollout_logprobs"]
        return drift_metrics(self.logprobs, rollout, self.batch.loss_mask, self.versions, self.version)

    def abs_differences(self) -> Tensor:
        """abs(d) in nats of the fresh tokens, float64 [B, S]: 0 elsewhere, infinite where d is not finite."""
        d = self.logprobs.double() - self.batch.fields["rollout_logprobs"].double()
        return torch.where(self.fresh, d.abs().nan_to_num(torch.inf, torch.inf), 0.0)

    def followed_by(self, other: ScoredBatch) -> ScoredBatch:
        """Return both batches as one. `other` was scored at the same version; neither batch may have routes."""
        width = max(self.batch.width, other.batch.width)

        def both(mine: Tensor, theirs: Tensor, value: float = 0) -> Tensor:
            return torch.cat([F.pad(part, (0, width - part.shape[1]), value=value) for part in (mine, theirs)])

        return dataclasses.replace(
            self,
            batch=self.batch.padded(width).followed_by(other.batch.padded(width)),
            versions=both(self.versions, other.versions),
            logprobs=both(self.logprobs, other.logprobs),
            draws=None if self.draws is None or other.draws is None else both(self.draws, other.draws, value=NOT_DRAWN),
        )

    def worst_rows(self, count: int) -> list[int]:
        """The rows with the largest abs(d) of any token, the worst first; rows with a non-finite d come before all."""
        largest = self.abs_differences().amax(dim=1)
        return largest.argsort(descending=True, stable=True)[:count].tolist()

    def select(self, rows: Sequence[int]) -> ScoredBatch:
        """Return the batch with these rows only, trimmed to the longest of them."""
        batch, index = self.batch.select(rows), torch.tensor(rows)

        def trim(value: Tensor) -> Tensor:
            return value[index, : batch.width].contiguous()

        return dataclasses.replace(
            self,
            batch=batch,
            versions=trim(self.versions),
            logprobs=trim(self.logprobs),
            routes=None if self.routes is None else trim(self.routes),
            draws=None if self.draws is None else trim(self.draws),
        )


def redraw_metrics(draws: Tensor, tokens: Tensor, mask: Tensor) -> dict[str, float]:
    """Return `mismatch/redraw_...` of a batch; nothing if no token was drawn again.

    draws, tokens: int64 [B, S]; draws: `NOT_DRAWN` where the trainer drew none. mask: bool [B, S], the tokens that were
    sampled at the weights that the trainer drew with.
    """
    drawn = mask & (draws != NOT_DRAWN)
    count = int(drawn.sum())
    if not count:
        return {}
    same = int((drawn & (draws == tokens)).sum())
    return {"mismatch/redraw_frac": same / count, "mismatch/redraw_tokens": float(count)}


# Agreement on experts. The experts of a token in a layer are a set: their order, which near-ties may swap, changes no
# result.

_CHUNK = 1 << 22
"""Route entries compared at a time, which takes little memory compared with the routes. A small batch is one chunk."""


def router_metrics(train_routes: Tensor, rollout_routes: Tensor, mask: Tensor) -> dict[str, float]:
    """Return `mismatch/router_...` of one batch; `rl.record.metrics` has meanings and denominators.

    A (token, layer) pair is known if both sides report all of its K experts; other pairs are counted as unknown. The
    agreement of a pair is |trainer's ∩ engine's| / K. If no pair is known, only the counts are returned.

    Args:
        train_routes: int16 [B, S, L, K], the trainer's own choice, K different experts or -1 where unknown.
        rollout_routes: int16 [B, S, L, K], the engine's choice, in the same form.
        mask: bool [B, S], the tokens to compare.

    Returns:
        Finite floats by metric name.
    """
    _, width, layers, top_k = train_routes.shape
    rows = max(1, _CHUNK // max(1, width * layers * top_k))
    chunks = zip(train_routes.split(rows), rollout_routes.split(rows), mask.split(rows))
    shared = torch.cat([_shared_experts(train[chosen], rollout[chosen]) for train, rollout, chosen in chunks])

    known, differs = shared >= 0, (shared >= 0) & (shared < top_k)
    pairs, tokens = int(known.sum()), int(known.any(dim=1).sum())
    metrics = {
        "mismatch/router_pairs": float(pairs),
        "mismatch/router_tokens": float(tokens),
        "mismatch/router_unknown_pairs": float(known.numel() - pairs),
    }
    if not pairs:
        return metrics
    totals = list(zip(shared.clamp(min=0).sum(dim=0).tolist(), known.sum(dim=0).tolist()))
    return metrics | {
        "mismatch/router_agreement": sum(total for total, _ in totals) / (pairs * top_k),
        "mismatch/router_differ_frac": int(differs.sum()) / pairs,
        "mismatch/router_token_differ_frac": int(differs.any(dim=1).sum()) / tokens,
        **{
            f"mismatch/router_agreement_layer_{layer}": total / (count * top_k)
            for layer, (total, count) in enumerate(totals)
            if count
        },
    }


def _shared_experts(train: Tensor, rollout: Tensor) -> Tensor:
    """Count the experts that both sides chose, int16 [N, L]; -1 if a side reports none. routes: int16 [N, L, K]."""
    known = (train >= 0).all(dim=-1) & (rollout >= 0).all(dim=-1)
    # Most pairs are equal in order too, which costs far less to see than to compare all K x K experts.
    differs = known & (train != rollout).any(dim=-1)
    shared = torch.where(known, train.shape[-1], -1).short()
    matches = train[differs][:, :, None] == rollout[differs][:, None, :]
    shared[differs] = matches.any(dim=-1).sum(dim=-1).short()
    return shared
