"""One batch as both sides saw it: what the monitors measure, and what a capsule keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from rl.mismatch import agreement, redraw_metrics, router_agreement
from trainer.batch import TokenBatch


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A batch and its first scoring, before anything is rejected or trained on.

    Attributes:
        batch: with the field `rollout_logprobs`, and `routes` if the engine reported any.
        versions: int64 [B, S], the weight version that sampled each token; 0 where none was sampled.
        version: the trainer's, while it scored.
        logprobs: fp32 [B, S], the trainer's.
        routes: int16 [B, S, L, K], the trainer's own choice of experts; None without `batch.routes`.
        draws: int64 [B, S], the tokens that the trainer drew again; None without `batch.seeds`.
    """

    batch: TokenBatch
    versions: Tensor
    version: int
    logprobs: Tensor
    routes: Tensor | None = None
    draws: Tensor | None = None

    def metrics(self, tis_cap: float) -> dict[str, float]:
        """The `mismatch/...` metrics; `tis_cap` is C of the clip fractions."""
        batch = self.batch
        metrics = agreement(
            self.logprobs,
            batch.fields["rollout_logprobs"],
            batch.loss_mask,
            tis_cap=tis_cap,
            versions=self.versions,
            version=self.version,
        )
        if self.draws is not None:
            fresh = batch.loss_mask & (self.versions == self.version)
            metrics |= redraw_metrics(self.draws, batch.tokens, fresh)
        if batch.routes is not None and self.routes is not None:
            metrics |= router_agreement(self.routes, batch.routes, batch.real_tokens())
        return metrics

    def abs_differences(self) -> Tensor:
        """abs(d) in nats, float64 [B, S]: 0 where nothing was sampled, infinite where d is not finite."""
        d = self.logprobs.double() - self.batch.fields["rollout_logprobs"].double()
        return torch.where(self.batch.loss_mask, d.abs().nan_to_num(torch.inf, torch.inf), 0.0)

    def worst_rows(self, count: int) -> list[int]:
        """The rows with the largest abs(d) of any token, the worst first; rows with a non-finite d come before all."""
        largest = self.abs_differences().amax(dim=1)
        return largest.argsort(descending=True, stable=True)[:count].tolist()

    def select(self, rows: Sequence[int]) -> Evidence:
        """These rows, trimmed to the longest of them."""
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
