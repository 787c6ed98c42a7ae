"""The tokens that one optimizer step trains on, as a padded batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences with per-token data. Index t of every [B, S] tensor speaks of the token at t.

    A log-probability at t is that of `tokens[b, t]` given `tokens[b, :t]`; index 0 has none and is never a target.

    Attributes:
        tokens: int64 [B, S], padding included (its value is arbitrary).
        lengths: int64 [B], tokens of each row without padding, 1 to S.
        loss_mask: bool [B, S], True where the token is a target of the loss.
        temperature: logits are divided by it before the softmax, as in sampling.
        fields: further float32 [B, S] tensors for the objective, such as `rollout_logprobs` and `advantages`.

    Raises:
        ValueError: a shape, a dtype, a length, the temperature or the mask breaks the rules above.
    """

    tokens: Tensor
    lengths: Tensor
    loss_mask: Tensor
    temperature: float = 1.0
    fields: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or 0 in self.tokens.shape:
            raise ValueError(f"tokens: found shape {list(self.tokens.shape)}, expected a non-empty [B, S]")
        shape = self.tokens.shape
        _expect("tokens", self.tokens, shape, torch.int64)
        _expect("lengths", self.lengths, shape[:1], torch.int64)
        _expect("loss_mask", self.loss_mask, shape, torch.bool)
        for name, value in self.fields.items():
            _expect(f"fields[{name!r}]", value, shape, torch.float32)
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

    def select(self, rows: Sequence[int] | Tensor) -> TokenBatch:
        """These rows in the order given, trimmed to the longest of them. The tensors are copies."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.tokens.device)
        if index.numel() == 0:
            raise ValueError("rows: found none, expected at least one row to select")
        lengths = self.lengths[index]
        width = int(lengths.max())

        def trim(value: Tensor) -> Tensor:
            return value[index, :width].contiguous()

        return TokenBatch(
            tokens=trim(self.tokens),
            lengths=lengths,
            loss_mask=trim(self.loss_mask),
            temperature=self.temperature,
            fields={name: trim(value) for name, value in self.fields.items()},
        )

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch with its tensors on `device`."""
        return TokenBatch(
            tokens=self.tokens.to(device),
            lengths=self.lengths.to(device),
            loss_mask=self.loss_mask.to(device),
            temperature=self.temperature,
            fields={name: value.to(device) for name, value in self.fields.items()},
        )


def _expect(name: str, value: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tuple(value.shape) != tuple(shape) or value.dtype != dtype:
        found = f"{value.dtype} {list(value.shape)}"
        raise ValueError(f"{name}: found {found}, expected {dtype} {list(shape)} to match tokens")
