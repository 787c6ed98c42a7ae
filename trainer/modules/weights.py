"""Parameters with the tags by which Megatron and mbridge tell how a tensor is split over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


def tag_split(weight: Tensor, axis: int) -> None:
    """Tag a weight as split over the tensor-parallel ranks along `axis`.

    Megatron does it while it initialises a weight, which the trainer skips; the gradient norm and mbridge go by it.
    """
    set_tensor_model_parallel_attributes(weight, True, axis, 1)


def norm_weight(config: TransformerConfig, size: int) -> nn.Parameter:
    """A weight of ones with Megatron's `sequence_parallel` tag.

    Each tensor-parallel rank sees its part of the sequence, so the gradients of a norm have to be added.
    """
    weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return weight


class GroupedWeights(nn.Module):
    """The weights of this rank's experts as `weight0`, `weight1`, … [N, K], TransformerEngine's GroupedLinear names.

    The experts are not split over tensor-parallel ranks (expert_tensor_parallel_size is 1).
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self._groups = pg_collection
        for index in range(num_gemms):
            weight = nn.Parameter(
                torch.empty(output_size, input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            setattr(self, f"weight{index}", weight)

    def weights(self) -> list[nn.Parameter]:
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """All experts of a layer under one key, this rank's at their global indices."""
        metadata = metadata or {}
        groups = self._groups
        total, first = groups.ep.size() * self.num_gemms, groups.ep.rank() * self.num_gemms
        sharded: ShardedStateDict = {}
        for index, weight in enumerate(self.weights()):
            key = f"{index}.weight"
            offsets = (*sharded_offsets, (len(sharded_offsets), first + index, total))
            one = make_sharded_tensors_for_checkpoint(
                {key: weight}, "", {}, offsets, tp_group=groups.expt_tp, dp_cp_group=metadata["dp_cp_group"]
            )
            replace_prefix_for_sharding(one, f"{index}.", prefix)
            tensor = one[key]
            tensor.replica_id = (*tensor.replica_id[:2], groups.expt_dp.rank())
            sharded[f"{prefix}weight{index}"] = tensor
        return sharded
