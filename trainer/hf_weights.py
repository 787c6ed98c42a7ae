"""A model's weights, to and from the tensors of its Hugging Face checkpoint, on any parallel layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from safetensors.torch import save_file
from torch import Tensor

from models.stored import check_finite
from models.tensors import TensorTable
from numerics.errors import user_error
from numerics.files import publish_directory
from numerics.quantize import QuantizedTensor
from numerics.spec import TensorSpec
from trainer import te_weights
from trainer.table_bridge import TableBridge

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_SHARD_BYTES = 4 << 30


class HFWeights:
    """The way between one model's parameters and the tensors of its Hugging Face checkpoint.

    Every method needs all ranks. A weight that TransformerEngine holds in FP8 goes the same way twice: its codes as a
    matrix [N, K], and its scales as a matrix [N / block, K / block].

    config: of the Megatron model. quantized_as: how such weights are quantized.
    """

    def __init__(
        self,
        model_path: Path,
        table: TensorTable,
        config: TransformerConfig,
        quantized_as: TensorSpec,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._path, self._spec, self._dtype = Path(model_path), quantized_as, dtype
        self._table = table
        self._bridge = TableBridge(table, config)
        self._scale_bridge = TableBridge(table, config, quantized_as.group)

    @torch.no_grad()
    def load(self, model: GPTModel) -> None:
        """Fill the model from the directory's safetensors files."""
        if not any(self._path.glob("*.safetensors")):
            raise user_error(
                "model.path",
                found=str(self._path),
                expected="a model directory with *.safetensors weights",
                remedy="Download the weights, or convert them to safetensors.",
            )
        quantized = {name: p for name, p in model.named_parameters() if te_weights.is_quantized(p)}
        plain = {name: torch.empty(p.shape, dtype=self._dtype, device=p.device) for name, p in quantized.items()}
        tensors = {name: plain.get(name, held.detach()) for name, held in self._held(model)}
        self._bridge.load_weights([_StandIn(model, tensors)], str(self._path))
        names = self.names(model)
        for name, tensor in tensors.items():
            check_finite(" and ".join(names[name]), tensor)
        for name, parameter in quantized.items():
            te_weights.fill(parameter, plain.pop(name))

    @torch.no_grad()
    def export(self, model: GPTModel) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Yield (HF name, tensor) for every tensor of the checkpoint, on rank 0; other ranks yield nothing.

        A weight that TransformerEngine holds in FP8 is yielded as it holds it. The tensors may share memory with the
        parameters: use or copy them before the next training step.
        """
        values: dict[str, Tensor] = {}
        scales: dict[str, Tensor] = {}
        for name, held in self._held(model):
            values[name] = held.detach()
            if te_weights.is_quantized(held):
                weight = te_weights.quantized(held)
                assert weight.spec == self._spec, f"{name} is {weight.spec}, expected {self._spec}"
                values[name], scales[name] = weight.data.view(torch.uint8), weight.scale_inv.contiguous()
        exported_scales = self._scale_bridge.export_weights([_StandIn(model, scales)])
        seen: set[str] = set()
        for name, tensor in self._bridge.export_weights([_StandIn(model, values)]):
            if tensor.dtype is torch.uint8:
                # Both go through the parameters in one order, so their collectives meet on all ranks.
                scale_name, scale_inv = next(exported_scales)
                assert scale_name == name
                tensor = QuantizedTensor(tensor.view(self._spec.dtype), scale_inv, self._spec)
            # A tied embedding also stands at the last pipeline stage.
            if dist.get_rank() == 0 and name not in seen:
                seen.add(name)
                yield name, tensor
        lacking = sorted(self._table.rows.keys() - seen)
        if dist.get_rank() == 0 and lacking:
            raise RuntimeError(f"export: found no parameter with {', '.join(lacking[:5])}, expected every tensor")

    def names(self, model: GPTModel) -> dict[str, list[str]]:
        """The tensors of the checkpoint that each parameter of this rank holds, whole or in part, by its name."""
        whole = self._bridge._weight_name_mapping_mcore_local_to_global(model)
        return {name: [row.name for row in self._bridge.rows(whole[name])] for name, _ in self._held(model)}

    def _held(self, model: GPTModel) -> Iterator[tuple[str, Tensor]]:
        """Everything of this rank's that is a tensor of the checkpoint."""
        yield from model.named_parameters()
        whole = self._bridge._weight_name_mapping_mcore_local_to_global(model)
        for name, buffer in model.named_buffers():
            if whole.get(name) in self._table.in_megatron:
                yield name, buffer

    def write(self, model: GPTModel, path: Path) -> None:
        """Write a Hugging Face directory: the weights, dequantized, and every other file of the source directory."""
        path = Path(path).absolute()
        partial = path.with_name(f".{path.name}.partial")
        tensors = self.export(model)
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self._path, partial, ignore=shutil.ignore_patterns(*_WEIGHT_FILES, ".*"))
            plain = ((n, t.dequantize(self._dtype) if isinstance(t, QuantizedTensor) else t) for n, t in tensors)
            _write_shards(plain, partial)
            publish_directory(partial, path)
        else:
            for _ in tensors:
                pass
        dist.barrier()


class _StandIn:
    """A model as mbridge sees it, with these tensors in place of its parameters."""

    def __init__(self, model: GPTModel, tensors: dict[str, Tensor]) -> None:
        self._model, self._tensors = model, tensors
        held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        for name, tensor in tensors.items():
            # By these tags mbridge gathers. Experts have them for the gradient norm alone: no rank has split them.
            split = getattr(held[name], "tensor_model_parallel", False) and ".experts." not in name
            tensor.tensor_model_parallel = split  # type: ignore[attr-defined]
            tensor.partition_dim = getattr(held[name], "partition_dim", -1)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())

    def state_dict(self) -> dict[str, Tensor]:
        return self._tensors


def _write_shards(tensors: Iterator[tuple[str, Tensor]], directory: Path) -> None:
    """Write safetensors files of about four GiB, and an index if there are several."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors:
        tensor = tensor.cpu().contiguous().clone()
        size += tensor.nbytes
        if shards[-1] and size > _SHARD_BYTES:
            shards.append({})
            size = tensor.nbytes
        shards[-1][name] = tensor
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (directory / "model.safetensors.index.json").write_text(text)
