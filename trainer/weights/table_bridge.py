"""mbridge's traversal of a model and its ranks, with the table of the model's tensors for names and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mbridge.core import Bridge
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from fp8rl.models.checkpoint.reading import read_tensors
from fp8rl.models.tensors import TensorRow, TensorTable


class TableBridge(Bridge):
    """The loader and exporter of a Megatron model's parameters as tensors of its Hugging Face checkpoint.

    block: rows and columns of a weight for each element of what is exported; 1 for the weights themselves.
    """

    def __init__(self, table: TensorTable, config: TransformerConfig, block: int = 1) -> None:
        self._table, self._block, self._megatron = table, block, config
        super().__init__(hf_config=None)

    def rows(self, parameter: str) -> Sequence[TensorRow]:
        """Return the tensors in a parameter, by its name in the whole model."""
        return self._table.in_megatron[parameter]

    def whole_names(self, model: Any) -> dict[str, str]:
        """Return the names of a rank's parameters in the whole model."""
        names: dict[str, str] = super()._weight_name_mapping_mcore_local_to_global(model)
        return names

    def _weight_name_mapping_mcore_local_to_global(self, model: Any, consider_ep: bool = True) -> dict[str, str]:
        """Return each parameter's name in the whole model, by which it goes here already (`HFWeights.load`).

        mbridge asks for layouts by a rank's own names, which in another pipeline stage may be those of another kind of
        layer.
        """
        return {name: name for name in model.state_dict()}

    def _build_config(self) -> TransformerConfig:
        return self._megatron

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        return _Files(weights_path)  # mbridge's takes what is no directory for a name on a hub

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        return [row.name for row in self.rows(mcore_weights_name)]

    def _weight_to_hf_format(self, mcore_weights_name: str, mcore_weights: Tensor) -> tuple[list[str], list[Tensor]]:
        rows = self.rows(mcore_weights_name)
        return [row.name for row in rows], self._table.split(mcore_weights, rows, self._block)

    def _weight_to_mcore_format(self, mcore_weights_name: str, hf_weights: list[Tensor]) -> Tensor:
        return self._table.fuse(hf_weights, self.rows(mcore_weights_name), self._block)

    def _weight_merge_across_tp(self, mcore_weights_name: str, mcore_weights: list[Tensor], param: Any) -> Tensor:
        """Merge one rank's part after the other into one tensor after the other."""
        rows, ranks = self.rows(mcore_weights_name), len(mcore_weights)
        if ranks == 1:
            return mcore_weights[0]
        if param.partition_dim == 1 or rows[0].megatron.layout == "heads":
            return torch.cat(mcore_weights, param.partition_dim)
        parts = [self._table.split(part, rows, self._block, ranks) for part in mcore_weights]
        return self._table.fuse([torch.cat(shares) for shares in zip(*parts)], rows, self._block)

    def _weight_split_across_tp(
        self, mcore_weights_name: str, mcore_weights: Tensor, param: Any, tp_split_size: int
    ) -> Sequence[Tensor]:
        """Undo the merge."""
        rows, ranks = self.rows(mcore_weights_name), tp_split_size
        if ranks == 1 or not param.tensor_model_parallel:
            return [mcore_weights] * ranks
        if param.partition_dim == 1 or rows[0].megatron.layout == "heads":
            return mcore_weights.chunk(ranks, param.partition_dim)
        whole = self._table.split(mcore_weights, rows, self._block)
        shares = zip(*(tensor.chunk(ranks) for tensor in whole))
        return [self._table.fuse(share, rows, self._block, ranks) for share in shares]


class _Files(SafeTensorIO):  # type: ignore[misc]
    """mbridge's, for weights that may be in FP8."""

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, Tensor]:
        return read_tensors(Path(self.hf_dir), hf_weight_names)
