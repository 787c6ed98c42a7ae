"""Holds the tokens that one optimizer step trains on, as a padded batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.sampling import EVERY_TOKEN, Truncation

# The tokens that a batch's tokens were drawn from, where top-p, top-k or min-p left some out.

NOT_CARRIED = 0
"""The `at` of a token without an entry in the pool. Its kept tokens are computed from the trainer's own logits."""


@dataclass(frozen=True)
class KeptTokenPool:
    """The tokens that truncation kept for each draw, for draws with weights that the trainer may no longer have."""

    at: Tensor
    """int64, usually [B, S]: where each token's entry in `pool` begins, or `NOT_CARRIED` if the token has no entry."""
    pool: Tensor
    """int32 [N]. An entry is the number of kept ids, then the ids. The first entry is empty, for `NOT_CARRIED`."""

    @classmethod
    def of(cls, carried: Tensor, counts: Tensor, ids: Tensor) -> KeptTokenPool:
        """Build the pool. carried: bool [B, S], True for tokens with an entry. counts: [M], the number of kept ids for
        each token with an entry, in row-major order. ids: [counts.sum()], their kept ids, in the same order."""
        counts, ids = counts.int(), ids.int()
        starts = 1 + torch.arange(len(counts)) + counts.cumsum(0) - counts
        pool = torch.zeros(1 + len(counts) + len(ids), dtype=torch.int32)
        is_id = torch.ones(len(pool), dtype=torch.bool)
        is_id[0] = is_id[starts] = False
        pool[starts], pool[is_id] = counts, ids
        at = torch.full(carried.shape, NOT_CARRIED)
        at[carried] = starts
        return cls(at, pool)

    def followed_by(self, other: KeptTokenPool) -> KeptTokenPool:
        """Append the pool of more rows."""
        moved = torch.where(other.at == NOT_CARRIED, NOT_CARRIED, other.at + len(self.pool))
        return KeptTokenPool(torch.cat([self.at, moved]), torch.cat([self.pool, other.pool]))

    def kept(self, vocabulary: int) -> Tensor:
        """Return bool [n, V], True for each token's kept ids. `at` must be [n]."""
        counts = self.pool[self.at].long()
        row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        place = torch.arange(len(row), device=counts.device) - (counts.cumsum(0) - counts)[row]
        kept = torch.zeros(len(counts), vocabulary, dtype=torch.bool, device=counts.device)
        kept[row, self.pool[self.at[row] + 1 + place].long()] = True
        return kept


def left_out(
    logits: Tensor, temperature: float, truncation: Truncation, drawn: Tensor, supports: KeptTokenPool | None
) -> Tensor:
    """Return bool [n, V], True for the ids that truncation left out, at each position of logits [n, V].

    drawn: bool [n], True if the token after the position was drawn. supports: [n], the ids that were kept for that
    token. If it has no entry, or if supports is None, truncation is applied to the logits.
    """
    settings = (temperature, truncation.top_p, truncation.top_k, truncation.min_p)
    of_rows = (torch.full((len(logits),), setting, device=logits.device) for setting in settings)
    floors = ops.truncation_floors(logits, *of_rows).masked_fill(~drawn, -torch.inf)
    out = logits < floors.unsqueeze(-1)
    if supports is not None:
        carried = (supports.at != NOT_CARRIED).nonzero().flatten()
        out[carried] = ~replace(supports, at=supports.at[carried]).kept(logits.shape[-1])
    return out


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

    Raises:
        ValueError: a field is not as its description says.
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
