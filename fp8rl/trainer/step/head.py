"""Computes logits, log-probabilities, entropy and draws from final hidden states. No other code computes logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from fp8rl.numerics import ops
from fp8rl.numerics.ops.linear import add_weight_gradient
from fp8rl.numerics.sampling import GREEDY, Truncation
from fp8rl.trainer.step.batch import LIKELY_IDS, UNKNOWN
from fp8rl.trainer.step.kept_tokens import KeptTokenPool, left_out
from fp8rl.trainer.step.microbatches import MicroBatch


@dataclass(frozen=True)
class Head:
    """The output projection of a model's last pipeline stage, as Megatron calls it."""

    layer: nn.Module
    """Megatron's layer, or another layer with the same signature."""
    weight: Tensor
    """[N, H], this tensor-parallel rank's part of the weight. If the model ties both, it is the embedding's weight."""

    def __call__(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the head's output [S, B, N] of all ranks, for example logits, for hidden states [S, B, H]. Hidden
        states may be only this tensor-parallel rank's part of S.

        weight: the weight to use in place of `self.weight`, for example one without a gradient.
        """
        used = self.weight if weight is None else weight
        out: Tensor = self.layer(hidden, weight=used, runtime_gather_output=None)[0]
        return out

    def local_product(self, hidden: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input [S * B, H] and the output [S * B, N / ranks] of the product with this rank's weight.

        hidden, out: the input of a call of the head, and the call's output or the gradient of the output. The product
        has the rows of all ranks, and this rank's columns.
        """
        ranks = out.shape[-1] // self.weight.shape[0]
        if ranks > 1:
            group: Any = self.layer.tp_group
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
            out = out.chunk(ranks, -1)[group.rank()]
        return hidden.flatten(0, 1), out.flatten(0, 1)


def head_of(model: GPTModel) -> Head:
    """Return the head of a model's last pipeline stage."""
    layer, tied = model.output_layer, model.share_embeddings_and_output_weights
    return Head(layer, model.shared_embedding_or_output_weight() if tied else layer.weight)


DRAWN_TOGETHER = 1024
"""Number of rows of logits that are copied at a time for draws."""


@dataclass(frozen=True)
class HeadOutput:
    """The head's output for the rows of a micro-batch. Values in the padding are arbitrary."""

    values: Tensor
    """FP32 [B, S - 1] with gradient: the log-probabilities of tokens 1 to S - 1, or a critic's values before them."""
    entropy: Tensor
    """FP32 [B, S - 1] with gradient: the entropy of the distribution that scores each token. A critic has 0."""
    draws: Tensor | None = None
    """int64 [B, S], as `Scored.draws`. None for a batch without seeds."""
    likely: Tensor | None = None
    """FP32 [B, S - 1, k] with gradient, log-probabilities of the batch's `LIKELY_IDS`; None for a batch without."""


def read_logprobs(hidden: Tensor, head: Head, micro: MicroBatch, chunk: int) -> HeadOutput:
    """Compute log-probabilities, entropy and draws: the output of a policy's head. Logits at t are for the token at
    t + 1.

    chunk: number of tokens whose logits exist at the same time. The logits of a chunk are computed in the forward pass
    and again in the backward pass, by the same ops. So log-probabilities and gradients of hidden states do not change.
    The gradient of the head's weight is summed over chunks in FP32, and rounded once.
    """
    rows = micro.predictors(hidden)
    targets = _Targets.of(micro, len(rows))
    chunks = -(-targets.tokens.numel() // chunk)
    if chunks == 1:
        values, entropy, likely, drawn = targets.read(head(rows))
    else:
        values, entropy, likely, drawn = _InChunks.apply(rows, head.weight, head, targets, chunks)
    if drawn is not None:
        drawn = torch.cat(
            [torch.full_like(micro.batch.tokens[:, :1], UNKNOWN), micro.from_targets(drawn.flatten(), UNKNOWN)], 1
        )
    if likely is not None:
        likely = torch.stack([micro.from_targets(each.flatten()) for each in likely], -1)
    return HeadOutput(micro.from_targets(values.flatten()), micro.from_targets(entropy.flatten()), drawn, likely)


def hidden_states(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Run Megatron's model, or its wrapper, up to the head. Return hidden states [s, b, H].

    With sequence parallelism they are this tensor-parallel rank's part of s. The last pipeline stage returns the final
    hidden states, other stages return the input of the next stage.
    """
    gpt = gpt_of(model)
    last, gpt.post_process = gpt.post_process, False  # asked where GPTModel would go on with its output layer
    try:
        tokens = micro.to_model(micro.batch.tokens)
        hidden: Tensor = model(tokens, position_ids=None, attention_mask=None, packed_seq_params=micro.packed_rows)
    finally:
        gpt.post_process = last
    return hidden


def gpt_of(model: nn.Module) -> GPTModel:
    """Return Megatron's model without its data-parallel wrapper."""
    return get_attr_wrapped_model(model, "post_process", return_model_obj=True)


@dataclass(frozen=True)
class _Targets:
    """The targets of a micro-batch in the order of the head's rows. Tensors are [tensor-parallel ranks, targets]."""

    tokens: Tensor
    """int64, the targets' ids."""
    temperature: float
    seeds: Tensor | None
    """int64, the seed of each target's draw. `GREEDY`: this target is not drawn. None: no target is drawn."""
    positions: Tensor
    """int64, the position of the token before the target, in its row."""
    drawn: Tensor
    """bool, True where the target was drawn."""
    truncation: Truncation
    """The limits with which drawn targets were drawn."""
    supports: KeptTokenPool | None
    """The tokens that truncation kept for each target, or None."""
    likely: Tensor | None = None
    """int64 [k, ranks, n], the ids of the engine's likeliest tokens, or None."""

    @classmethod
    def of(cls, micro: MicroBatch, count: int) -> _Targets:
        """Collect the targets of a micro-batch. count: number of targets on one rank."""

        def by_rank(values: Tensor) -> Tensor:
            return micro.targets_of(values).view(-1, count)

        batch, seeds = micro.batch, None
        positions = torch.arange(batch.width, device=batch.tokens.device).expand_as(batch.tokens)
        if batch.seeds is not None:
            seeds = by_rank(torch.where(batch.loss_mask, batch.seeds[:, None], GREEDY))
        supports = batch.supports and replace(batch.supports, at=by_rank(batch.supports.at))
        ids = batch.fields.get(LIKELY_IDS)
        likely = None if ids is None else torch.stack([by_rank(each) for each in ids.long().unbind(-1)])
        return cls(
            by_rank(batch.tokens),
            batch.temperature,
            seeds,
            by_rank((positions - 1).clamp(min=0)),
            by_rank(batch.loss_mask),
            batch.truncation,
            supports,
            likely,
        )

    def split(self, chunks: int) -> Iterator[_Targets]:
        whole = self.tokens.shape[1]
        for part in torch.arange(whole, device=self.tokens.device).tensor_split(chunks):
            yield self._at(part)

    def _at(self, places: Tensor) -> _Targets:
        return self._changed(lambda values: values[..., places])

    def _changed(self, change: Callable[[Tensor], Tensor]) -> _Targets:
        """Return the targets with `change` applied to every tensor [ranks, n]."""
        return replace(
            self,
            tokens=change(self.tokens),
            seeds=None if self.seeds is None else change(self.seeds),
            positions=change(self.positions),
            drawn=change(self.drawn),
            supports=self.supports and replace(self.supports, at=change(self.supports.at)),
            likely=None if self.likely is None else change(self.likely),
        )

    def read(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return log-probabilities and entropy, FP32 [ranks, n]; log-probabilities of the likeliest tokens, FP32 [k,
        ranks, n]; and the tokens drawn again, int64 [ranks, n]."""
        return *self.logprobs(logits), self._draws(logits.flatten(0, -2))

    def logprobs(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probabilities and entropy over the tokens that truncation keeps and the target itself; and the
        log-probabilities of the likeliest tokens, each by the op that the engine has computed it with."""
        logits = logits.view(*self.tokens.shape, -1)
        if self.truncation.cuts:
            out = self._left_out(logits.detach()).scatter_(-1, self.tokens.unsqueeze(-1), False)
            logits = logits.masked_fill(out, -torch.inf)
        found = ops.token_logprobs(logits, self.tokens, self.temperature)
        if self.likely is None:
            return *found, None
        return *found, torch.stack([ops.token_logprobs(logits, ids, self.temperature)[0] for ids in self.likely])

    def _left_out(self, logits: Tensor) -> Tensor:
        """Return bool [ranks, n, V], True for ids that truncation left out."""
        flat = self._changed(Tensor.flatten)
        rows = logits.flatten(0, -2)
        return left_out(rows, self.temperature, self.truncation, flat.drawn, flat.supports).view(logits.shape)

    @torch.no_grad()
    def _draws(self, logits: Tensor) -> Tensor | None:
        """Return the tokens drawn again, int64 [ranks, n], from logits [ranks * n, V]."""
        if self.seeds is None:
            return None
        seeds, positions = self.seeds.flatten(), self.positions.flatten()
        drawn = torch.full_like(seeds, UNKNOWN)
        for some in (seeds != GREEDY).nonzero().flatten().split(DRAWN_TOGETHER):
            temperatures, chosen = torch.full(some.shape, self.temperature, device=logits.device), logits[some]
            if self.truncation.cuts:
                out = self._changed(Tensor.flatten)._at(some)._left_out(chosen)
                chosen = chosen.masked_fill(out, -torch.inf)
            drawn[some] = ops.draw(chosen, temperatures, seeds[some], positions[some])
        return drawn.view_as(self.seeds)


class _InChunks(torch.autograd.Function):
    """Computes `_Targets.read` for the head's output on rows [n, 1, H]. The head gets one chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, head: Head, targets: _Targets, chunks: int
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(rows, weight)
        ctx.head, ctx.targets, ctx.chunks = head, targets, chunks
        ctx.set_materialize_grads(False)  # nobody may ask for the entropy's
        pieces = zip(rows.tensor_split(chunks), targets.split(chunks), strict=True)
        read = zip(*(part.read(head(piece, weight.detach())) for piece, part in pieces), strict=True)
        *scores, drawn = (None if parts[0] is None else torch.cat(parts, -1) for parts in read)
        if drawn is not None:
            ctx.mark_non_differentiable(drawn)
        return *scores, drawn

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        d_rows, d_weight = torch.empty_like(rows), torch.zeros_like(weight, dtype=torch.float32)
        given = [(index, grad) for index, grad in enumerate(grads[:3]) if grad is not None]
        d_read = zip(*(grad.tensor_split(ctx.chunks, -1) for _, grad in given), strict=True)
        pieces = (x.tensor_split(ctx.chunks) for x in (rows, d_rows))
        for piece, d_piece, part, d_part in zip(*pieces, ctx.targets.split(ctx.chunks), d_read, strict=True):
            with torch.enable_grad():
                piece = piece.detach().requires_grad_()
                logits = ctx.head(piece, weight.detach())
                read = part.logprobs(logits)
            (d_logits,) = torch.autograd.grad([read[index] for index, _ in given], logits, d_part)
            d_piece.copy_(torch.autograd.grad(logits, piece, d_logits)[0])
            x, dy = ctx.head.local_product(piece.detach(), d_logits)
            add_weight_gradient(d_weight, dy, x)
        return d_rows, d_weight.to(weight.dtype), None, None, None
