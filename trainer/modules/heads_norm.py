"""A norm over all heads of a token together, in one numerics mode as in the other."""

from __future__ import annotations

from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn


class HeadsNorm(nn.Module):
    """Norms queries or keys over the width of all heads (OLMoE), where Megatron would norm each head.

    The ranks of tensor parallelism gather their heads for it, so that the bits do not depend on the layout. Each has
    the whole weight and the gradient of its own heads' part, which Megatron adds up over them.

    norm: the class of a norm over the last axis. heads: of the whole model. hidden_size: of one head.
    """

    def __init__(
        self, *, norm: type[nn.Module], heads: int, config: TransformerConfig, hidden_size: int, eps: float
    ) -> None:
        super().__init__()
        self.norm = build_module(norm, config=config, hidden_size=heads * hidden_size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, heads of this rank, D] -> the same"""
        group = get_tensor_model_parallel_group()
        whole = self.norm(all_gather_last_dim_from_tensor_parallel_region(x.flatten(2), group))
        return whole.chunk(group.size(), -1)[group.rank()].unflatten(-1, x.shape[2:])
