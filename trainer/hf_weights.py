"""A model's weights, to and from the tensors of its Hugging Face checkpoint, on any parallel layout."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mbridge.core.bridge
import torch
import torch.distributed as dist
from mbridge import AutoBridge
from mbridge.core import Bridge
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from numerics.errors import user_error
from numerics.files import publish_directory
from numerics.quantize import QuantizedTensor
from numerics.spec import TensorSpec
from trainer import te_weights
from trainer.hf_config import ModelShape

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_SHARD_BYTES = 4 << 30


class HFWeights:
    """The way between one model's parameters and the tensors of its Hugging Face checkpoint.

    Every method needs all ranks. mbridge maps the names and splits and joins fused and parallel weights. A weight that
    TransformerEngine holds in FP8 goes the same way twice: its codes as a matrix [N, K], and its scales as a matrix
    [N / block, K / block], for which a head is as many rows high as it has blocks.

    quantized_as: how such weights are quantized.
    """

    def __init__(
        self, model_path: Path, shape: ModelShape, quantized_as: TensorSpec, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._path, self._spec, self._dtype = Path(model_path), quantized_as, dtype
        self._bridge = _bridge(self._path, shape, dtype)
        self._scale_bridge = copy.copy(self._bridge)
        self._scale_bridge.hf_config = copy.deepcopy(self._bridge.hf_config)
        self._scale_bridge.hf_config.hidden_size = shape.hidden_size // quantized_as.group
        self._scale_bridge.hf_config.head_dim = shape.head_dim // quantized_as.group

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
        tensors = {name: plain.get(name, parameter.detach()) for name, parameter in model.named_parameters()}
        self._bridge.load_weights([_StandIn(model, tensors)], str(self._path))
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
        for name, parameter in model.named_parameters():
            values[name] = parameter.detach()
            if te_weights.is_quantized(parameter):
                weight = te_weights.quantized(parameter)
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

    def names(self, model: GPTModel) -> dict[str, list[str]]:
        """The tensors of the checkpoint that each parameter of this rank holds, whole or in part, by its name."""
        bridge = self._bridge
        whole = bridge._weight_name_mapping_mcore_local_to_global(model)
        return {name: bridge._weight_name_mapping_mcore_to_hf(whole[name]) for name, _ in model.named_parameters()}

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
        parameters = dict(model.named_parameters())
        for name, tensor in tensors.items():
            # By these tags mbridge gathers. Experts have them for the gradient norm alone: no rank has split them.
            split = getattr(parameters[name], "tensor_model_parallel", False) and ".experts." not in name
            tensor.tensor_model_parallel = split  # type: ignore[attr-defined]
            tensor.partition_dim = getattr(parameters[name], "partition_dim", -1)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())

    def state_dict(self) -> dict[str, Tensor]:
        return self._tensors


def _between_stages(send: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`send`, which brings something to all pipeline stages, where there is more than one."""

    @functools.wraps(send)
    def sent(value: Any) -> Any:
        return value if parallel_state.get_pipeline_model_parallel_world_size() == 1 else send(value)

    return sent


# mbridge exchanges each parameter and, pickled, its name and shape, with stages that there may not be: four collectives
# for each of thousands of experts.
for _send in ("broadcast_str_from_megatron_pp", "broadcast_from_megatron_pp"):
    setattr(mbridge.core.bridge, _send, _between_stages(getattr(mbridge.core.bridge, _send)))


def _bridge(path: Path, shape: ModelShape, dtype: torch.dtype) -> Bridge:
    hf_config = copy.deepcopy(AutoConfig.from_pretrained(path))
    # mbridge records tied weights in a dictionary that all its models share; this instance gets its own.
    hf_config.tie_word_embeddings = False
    bridge = AutoBridge.from_config(hf_config, dtype=dtype)
    if shape.tied:
        bridge._DIRECT_MAPPING = bridge._DIRECT_MAPPING | {"output_layer.weight": "model.embed_tokens.weight"}
    return bridge


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
