"""A step of the trainer as its callers see it: the padded batch, the loss, and the results of a pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics.sampling import EVERY_TOKEN, Truncation
from fp8rl.trainer.step.kept_tokens import KeptTokenPool

LIKELY_IDS, LIKELY_LOGPROBS, OWN_LIKELY = "likely_ids", "likely_logprobs", "own_likely_logprobs"
"""Fields [B, S, k] of the engine's k likeliest tokens at each target: their ids, exact as float32, and the engine's and
the trainer's log-probabilities. The trainer adds its own, with gradient, for the objective."""
UNKNOWN = -1
"""The value in place of an expert or a draw that is not known."""
PAD_TOKEN = 0
"""The id of padding; any valid id would do. Padding is masked, and on the right, where no real token attends to it."""


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences with data for each token. Index t of every [B, S] tensor belongs to the token at t.

    The log-probability at t belongs to `tokens[b, t]`, given `tokens[b, :t]`. Index 0 has none, and is never a target.
    Raises ValueError: a field is not as its description says.
    """

    tokens: Tensor
    """int64 [B, S]. Padding tokens may have any value."""
    lengths: Tensor
    """int64 [B], the number of tokens of each row without padding, 1 to S."""
    loss_mask: Tensor
    """bool [B, S], True where the token is a target of the loss."""
    temperature: float = 1.0
    """The temperature of sampling, by which logits are divided before the softmax."""
    fields: dict[str, Tensor] = field(default_factory=dict)
    """Further float32 tensors [B, S] or [B, S, k] for the objective, such as `rollout_logprobs` and `advantages`."""
    routes: Tensor | None = None
    """int16 [B, S, L, K], the K experts to which the engine sent each token in each of the L MoE layers. -1 for tokens
    without a report, such as padding and the last token of a row. None if the engine reported no experts."""
    replay: bool = False
    """Whether the trainer uses the experts in `routes` in place of its own choice (R3, arXiv 2510.11370)."""
    seeds: Tensor | None = None
    """int64 [B], the seed of each row with which the trainer repeats the draws of tokens with a loss. `GREEDY`: it
    repeats no draws of this row. None: it repeats no draws."""
    truncation: Truncation = EVERY_TOKEN
    """The limits with which tokens with a loss were drawn. They are scored among the tokens that the limits keep."""
    supports: KeptTokenPool | None = None
    """The tokens that truncation kept for each draw, with `at` [B, S]. None: the kept tokens are computed from the
    trainer's logits."""

    @classmethod
    def of(cls, prompts: Sequence[list[int]], targets: Sequence[list[int]], temperature: float = 1.0) -> TokenBatch:
        """Make a batch with a row for each prompt and the target behind it, whose tokens are the targets of the loss.
        Raises ValueError: there is no row, or a prompt is empty."""
        if not prompts:
            raise ValueError("found an empty batch, expected at least one sequence")
        for row, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"sequence {row}: found an empty prompt, expected at least one token (such as a BOS)")
        rows = [prompt + target for prompt, target in zip(prompts, targets, strict=True)]
        lengths = torch.tensor([len(row) for row in rows])
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
        position = torch.arange(int(lengths.max()))
        real = position < lengths[:, None]
        tokens = torch.full(real.shape, PAD_TOKEN, dtype=torch.int64)
        tokens[real] = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)  # row after row
        loss_mask = (position >= prompt_lengths[:, None]) & real
        return cls(tokens, lengths, loss_mask, temperature)

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or 0 in self.tokens.shape:
            raise ValueError(f"tokens: found shape {list(self.tokens.shape)}, expected a non-empty [B, S]")
        shape = self.tokens.shape
        _expect("tokens", self.tokens, shape, torch.int64)
        _expect("lengths", self.lengths, shape[:1], torch.int64)
        _expect("loss_mask", self.loss_mask, shape, torch.bool)
        if self.seeds is not None:
            _expect("seeds", self.seeds, shape[:1], torch.int64)
        if self.supports is not None:
            _expect("supports", self.supports.at, shape, torch.int64)
        for name, value in self.fields.items():
            _expect(f"fields[{name!r}]", value, (*shape, *value.shape[2:]), torch.float32)
        if self.routes is not None:
            _expect("routes", self.routes, (*shape, *self.routes.shape[-2:]), torch.int16)
        elif self.replay:
            raise ValueError("replay: found True and no routes, expected routes to replay")
        shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        if shortest < 1 or longest > shape[1]:
            raise ValueError(f"lengths: found {shortest} to {longest}, expected 1 to {shape[1]}, the width of tokens")
        if bool(self.loss_mask[:, 0].any()):
            raise ValueError("loss_mask: found True at index 0, expected False; a first token has no log-probability")
        if bool((self.loss_mask & ~self.real_tokens()).any()):
            raise ValueError("loss_mask: found True in the padding, expected False from each row's length on")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature: found {self.temperature}, expected a finite number above 0")

    @property
    def rows(self) -> int:
        """Number of sequences B."""
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """Padded length S."""
        return self.tokens.shape[1]

    def real_tokens(self) -> Tensor:
        """bool [B, S], False in the padding."""
        return torch.arange(self.width, device=self.lengths.device) < self.lengths[:, None]

    def with_fields(self, **fields: Tensor) -> TokenBatch:
        """Return the batch with these fields too, float32 [B, S]."""
        return replace(self, fields=self.fields | fields)

    def select(self, rows: Sequence[int] | Tensor) -> TokenBatch:
        """Return these rows in the order given, trimmed to the longest of them. The tensors are copies."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.tokens.device)
        if index.numel() == 0:
            raise ValueError("rows: found none, expected at least one row to select")
        lengths = self.lengths[index]
        width = int(lengths.max())

        def trim(value: Tensor) -> Tensor:
            return value[index, :width].contiguous()

        return self._changed(trim, lengths, None if self.seeds is None else self.seeds[index])

    def padded(self, width: int) -> TokenBatch:
        """Return the same rows padded to `width` tokens. width: not less than the present width."""
        extra = width - self.width

        def pad(value: Tensor) -> Tensor:
            behind = (0, 0) * (value.dim() - 2)
            return F.pad(value, (*behind, 0, extra), value=UNKNOWN if value.dim() == 4 else 0)

        return self._changed(pad, self.lengths, self.seeds) if extra else self

    def followed_by(self, other: TokenBatch) -> TokenBatch:
        """Append the rows of another batch of the same width, temperature and fields. Neither may have routes."""
        if self.routes is not None or other.routes is not None or self.temperature != other.temperature:
            raise ValueError("found batches with routes or two temperatures, expected no routes and one temperature")
        if self.truncation != other.truncation or (self.supports is None) != (other.supports is None):
            raise ValueError("found batches that differ in truncation or supports, expected the same in both")
        seeds = None if self.seeds is None or other.seeds is None else torch.cat([self.seeds, other.seeds])
        return replace(
            self,
            tokens=torch.cat([self.tokens, other.tokens]),
            lengths=torch.cat([self.lengths, other.lengths]),
            loss_mask=torch.cat([self.loss_mask, other.loss_mask]),
            fields={name: torch.cat([value, other.fields[name]]) for name, value in self.fields.items()},
            seeds=seeds,
            supports=self.supports and other.supports and self.supports.followed_by(other.supports),
        )

    def to(self, device: torch.device | str) -> TokenBatch:
        """Return the same batch with its tensors on `device`."""
        seeds = None if self.seeds is None else self.seeds.to(device)
        moved = self._changed(lambda value: value.to(device), self.lengths.to(device), seeds)
        if moved.supports is None:
            return moved
        return replace(moved, supports=replace(moved.supports, pool=moved.supports.pool.to(device)))

    def _changed(self, change: Callable[[Tensor], Tensor], lengths: Tensor, seeds: Tensor | None) -> TokenBatch:
        """Return the batch with `change` applied to every [B, S, ...] tensor."""
        return replace(
            self,
            tokens=change(self.tokens),
            lengths=lengths,
            loss_mask=change(self.loss_mask),
            fields={name: change(value) for name, value in self.fields.items()},
            routes=None if self.routes is None else change(self.routes),
            seeds=seeds,
            supports=self.supports and replace(self.supports, at=change(self.supports.at)),
        )


def _expect(name: str, value: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tuple(value.shape) != tuple(shape) or value.dtype != dtype:
        found = f"{value.dtype} {list(value.shape)}"
        raise ValueError(f"{name}: found {found}, expected {dtype} {list(shape)} to match tokens")


# The loss, and the results of a pass. The trainer needs no other RL code.


@dataclass(frozen=True)
class ObjectiveOutput:
    """One micro-batch's share of the loss and of the metrics."""

    loss: Tensor
    """The micro-batch's share of the loss, a scalar with gradient."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """The micro-batch's share of each metric, a scalar, by the metric's name (e.g. `train/entropy`)."""


class Objective(Protocol):
    """A loss that is a sum: its sum over micro-batches and data-parallel ranks is the loss of the whole batch.

    An objective is built once per step from the whole batch, and has the denominators of the whole batch. So the loss
    and the metrics depend neither on the division into micro-batches nor on the number of ranks.
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch, /) -> ObjectiveOutput:
        """Return the share that the rows of `batch` have in the loss.

        Args:
            logprobs: fp32 [B, S] with gradient, aligned as in :class:`TokenBatch`. Index 0 and padding are ignored. A
                critic's objective gets the critic's values.
            entropy: fp32 [B, S] with gradient, the entropy of the distribution that gives each token its score. This
                distribution has the batch's temperature, and only the tokens that the batch's truncation keeps.
            batch: the rows, on the device of `logprobs`.
        """
        ...


@dataclass(frozen=True)
class Scored:
    """The results of a forward pass for each token."""

    logprobs: Tensor
    """fp32 [B, S] on the CPU, log-probabilities or a critic's values with the weights before the step. Zero at index 0
    and in the padding."""
    routes: Tensor | None = None
    """int16 [B, S, L, K] on the CPU, the experts that the trainer's own router chooses for each token, in ascending
    order, with or without replay. -1 in the padding. None for a batch without routes."""
    draws: Tensor | None = None
    """int64 [B, S] on the CPU, the token that `numerics.ops.draw` draws from the trainer's logits at each position. -1
    if the token there has no loss, or its row no seed. None for a batch without seeds, and for a critic."""

    @classmethod
    def assembled(cls, parts: Sequence[tuple[Sequence[int], Any]], batch: TokenBatch, rows: int) -> Scored:
        """Assemble the results for `rows` rows of a batch.

        parts: the places of some of these rows, and an object with their results, whose tensors [b, s, ...] may have
        padding behind the rows and behind each row.
        """

        def whole(name: str, filled: Tensor) -> Tensor:
            for places, found in parts:
                values = getattr(found, name)
                width = min(values.shape[1], batch.width)
                filled[places, :width] = values[: len(places), :width].cpu()
            return filled

        shape, routes, draws = (rows, batch.width), None, None
        if batch.routes is not None:
            routes = whole("routes", torch.full((*shape, *batch.routes.shape[2:]), UNKNOWN, dtype=torch.int16))
        if batch.seeds is not None and all(found.draws is not None for _, found in parts):
            draws = whole("draws", torch.full(shape, UNKNOWN))
        return Scored(whole("logprobs", torch.zeros(shape)), routes, draws)


@dataclass(frozen=True, kw_only=True)
class PassResult(Scored):
    """The results of one forward and backward pass."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The objective's metrics, summed over the whole batch."""
    loss: float = math.nan
    """The loss of the whole batch. NaN if no pass succeeded."""
    grad_norm: float = math.nan
    """The global gradient norm before clipping. NaN if it was not computed."""
    seconds: float = 0.0
    """Seconds from the arrival of the batch on the ranks to the gradient norm."""


class NonFiniteLossError(FloatingPointError):
    """A loss or a gradient norm was NaN or infinite. The weights were not changed.

    rows: for a loss, all rows of the micro-batches with such a loss. For a norm, all rows of the batch.
    """

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message, list(rows))  # both, so that the error survives pickling
        self.message, self.rows = message, list(rows)

    def __str__(self) -> str:
        return self.message
