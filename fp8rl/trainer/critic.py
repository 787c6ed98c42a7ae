"""One rank of a critic: a model that says what reward is still to come, in place of what token comes next."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.step.head import Head, HeadOutput
from fp8rl.trainer.step.microbatches import MicroBatch
from fp8rl.trainer.trainer import Trainer


class Critic(Trainer):
    """Trains a model with a value head on this rank. Values stand wherever a `Trainer` has log-probabilities: that at t
    is what is expected, before the token at t is chosen, of what is still to come.
    """

    def _read_head(self, hidden: Tensor, head: Head, micro: MicroBatch) -> HeadOutput:
        return read_values(hidden, head, micro)

    def _is_trained_whole(self, name: str) -> bool:
        return is_of_value_head(name)

    def _finish(self, model: GPTModel) -> None:
        give_value_head(model, self.layout)


def read_values(hidden: Tensor, head: Head, micro: MicroBatch) -> HeadOutput:
    """Read the value before each token but the first; a value has no entropy, and draws no tokens."""
    values = micro.from_model(head(hidden).transpose(0, 1).contiguous()[..., 0])[:, :-1]
    return HeadOutput(values, torch.zeros_like(values))


def is_of_value_head(name: str) -> bool:
    """Return whether this is a parameter of a critic's head, by its name: where others have adapters, it is trained
    itself."""
    return name.startswith("output_layer.")


def give_value_head(model: GPTModel, layout: Layout) -> None:
    """Put a value head in place of a model's output projection, which it may have shared with the embedding."""
    model.share_embeddings_and_output_weights = False
    if model.post_process:
        model.output_layer = ValueHead(model.config, layout)


class ValueHead(nn.Module):
    """An FP32 product with one vector that starts at zero, in place of the output projection. Every tensor-parallel
    rank holds it and takes the whole sequence.

    The vector has the dtype of the other weights, and like them an FP32 master: megatron-core 0.16.1 cannot write
    checkpoints of an optimizer over weights of two dtypes.
    """

    def __init__(self, config: TransformerConfig, layout: Layout) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """[S, B, H], or this rank's part of S -> [S, B, 1]."""
        if self.config.sequence_parallel:
            # Every rank goes on with the whole, so that each has the whole gradient and takes its own part of it.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.layout.tp_group
            )
        # A sum for each token by itself, so that a value does not depend on its batch.
        return (hidden.float() * self.weight[0].float()).sum(-1, keepdim=True), None
