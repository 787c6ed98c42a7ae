"""Parameters with the tags that tell Megatron how a tensor is split over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
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

    Megatron sets the tag when it initialises a weight, which the trainer skips. The gradient norm and the exchange of
    weights read it.
    """
    set_tensor_model_parallel_attributes(weight, True, axis, 1)


def norm_parameter(config: TransformerConfig, size: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a norm's weight, all ones, with Megatron's `sequence_parallel` tag.

    Each tensor-parallel rank sees a part of the sequence, so by this tag Megatron adds the ranks' gradients of a norm.
    """
    weight = nn.Parameter(torch.ones(size, dtype=dtype or config.params_dtype, device=torch.cuda.current_device()))
    setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return weight


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters by TransformerEngine's names. Stacked experts give views `weight0`, `weight1`, …"""
    for name, parameter in model.named_parameters():
        yield from matrices(name, parameter)


def matrices(name: str, of_parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter, or a tensor of its shape, with its name. Of stacked experts [experts, N, K], yield each."""
    if of_parameter.dim() < 3:
        yield name, of_parameter
    else:
        yield from ((f"{name}{index}", matrix) for index, matrix in enumerate(of_parameter.detach()))


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2].startswith("lora_")


def beside(weight: str, letter: str) -> str:
    """Return the name of parameter `a` or `b` of a weight's adapter. Both names may end in an expert's number."""
    before, _, number = weight.rpartition("weight")
    return f"{before}lora_{letter}{number}"


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
            setattr(self, f"weight{index}", empty_weight(config, output_size, input_size))

    def weights(self) -> list[nn.Parameter]:
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return all experts of a layer under one key. This rank's experts have their global indices."""
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


def empty_weight(config: TransformerConfig, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a parameter that something will fill."""
    device = torch.cuda.current_device()
    return nn.Parameter(torch.empty(shape, dtype=dtype or config.params_dtype, device=device))
