"""The output projection of a model, which final hidden states meet in a `Reading`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn


@dataclass(frozen=True)
class Head:
    """The output projection of a model's last pipeline stage, as Megatron calls it.

    Attributes:
        layer: Megatron's, or another that is called like it.
        weight: [N, H], of this tensor-parallel rank's part of N. It is the embedding's where the model ties them.
    """

    layer: nn.Module
    weight: Tensor

    def __call__(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """Hidden states [S, B, H], or this tensor-parallel rank's part of S -> [S, B, N], logits or whatever the head
        gives. weight: in place of its own, for example without a gradient."""
        out: Tensor = self.layer(hidden, weight=self.weight if weight is None else weight, runtime_gather_output=None)[
            0
        ]
        return out

    def local_product(self, hidden: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank's weight is multiplied by, and what that gives, of the input and the output of a call: all
        ranks' rows [S * B, H], and this rank's columns [S * B, N / ranks] of the output or of its gradient."""
        ranks = out.shape[-1] // self.weight.shape[0]
        if ranks > 1:
            group: Any = self.layer.tp_group
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
            out = out.chunk(ranks, -1)[group.rank()]
        return hidden.flatten(0, 1), out.flatten(0, 1)


def head_of(model: GPTModel) -> Head:
    """The head of a model's last pipeline stage."""
    layer, tied = model.output_layer, model.share_embeddings_and_output_weights
    return Head(layer, model.shared_embedding_or_output_weight() if tied else layer.weight)
