"""Build the stock GPTModel of a Hugging Face Qwen3 directory, and move its weights in and out."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

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
from trainer.config import TrainerConfig
from trainer.hf_config import ModelShape, transformer_config
from trainer.modules import exact, native
from trainer.modules.embedding import Embedding
from trainer.modules.layer import block_spec
from trainer.modules.precision import Precision
from trainer.modules.weights import tag_split

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_SHARD_BYTES = 4 << 30


def build_model(
    shape: ModelShape,
    config: TrainerConfig,
    precision: Precision,
    max_sequence_length: int,
    dtype: torch.dtype = torch.bfloat16,
) -> GPTModel:
    """This rank's part of the model, with uninitialised weights."""
    mode = precision.numerics.mode
    modules = exact.layer_modules(shape, precision) if mode == "exact" else native.layer_modules(precision)
    megatron_config = transformer_config(shape, config, dtype, mode)
    model = GPTModel(
        megatron_config,
        block_spec(megatron_config, shape, precision, modules),
        vocab_size=shape.vocab_size,
        max_sequence_length=max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none" if mode == "exact" else "rope",
        rotary_base=shape.rope_theta,
    )
    _finish_ends(model)
    if mode == "exact":
        exact.use_shared_output(model)
    return model


class HFWeights:
    """The way between one model's parameters and the tensors of its Hugging Face checkpoint.

    Works on any parallel layout; every method needs all ranks.
    """

    def __init__(self, model_path: Path, shape: ModelShape, dtype: torch.dtype = torch.bfloat16) -> None:
        self._path = Path(model_path)
        self._bridge = _bridge(self._path, shape, dtype)

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
        self._bridge.load_weights([model], str(self._path))

    @torch.no_grad()
    def export(self, model: GPTModel) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, tensor) for every tensor of the checkpoint, on rank 0; other ranks yield nothing.

        The tensors may share memory with the parameters: use or copy them before the next training step.
        """
        seen: set[str] = set()
        with _experts_as_whole(model):
            for name, tensor in self._bridge.export_weights([model]):
                # A tied embedding also stands at the last pipeline stage.
                if dist.get_rank() == 0 and name not in seen:
                    seen.add(name)
                    yield name, tensor.detach()

    def names(self, model: GPTModel) -> dict[str, list[str]]:
        """The tensors of the checkpoint that each parameter of this rank holds, whole or in part, by its name."""
        bridge = self._bridge
        whole = bridge._weight_name_mapping_mcore_local_to_global(model)
        return {name: bridge._weight_name_mapping_mcore_to_hf(whole[name]) for name, _ in model.named_parameters()}

    def write(self, model: GPTModel, path: Path) -> None:
        """Write a Hugging Face directory: the weights, and every other file of the source directory."""
        path = Path(path).absolute()
        partial = path.with_name(f".{path.name}.partial")
        tensors = self.export(model)
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self._path, partial, ignore=shutil.ignore_patterns(*_WEIGHT_FILES, ".*"))
            _write_shards(tensors, partial)
            publish_directory(partial, path)
        else:
            for _ in tensors:
                pass
        dist.barrier()


def _finish_ends(model: GPTModel) -> None:
    """GPTModel names the classes of its embedding and output projection itself: correct the finished instances."""
    if model.pre_process:
        model.embedding.word_embeddings.__class__ = Embedding
        tag_split(model.embedding.word_embeddings.weight, 0)
    if model.post_process and model.output_layer.weight is not None:
        tag_split(model.output_layer.weight, 0)


def _bridge(path: Path, shape: ModelShape, dtype: torch.dtype) -> Bridge:
    hf_config = copy.deepcopy(AutoConfig.from_pretrained(path))
    # mbridge records tied weights in a dictionary that all its models share; this instance gets its own.
    hf_config.tie_word_embeddings = False
    bridge = AutoBridge.from_config(hf_config, dtype=dtype)
    if shape.tied:
        bridge._DIRECT_MAPPING = bridge._DIRECT_MAPPING | {"output_layer.weight": "model.embed_tokens.weight"}
    return bridge


@contextlib.contextmanager
def _experts_as_whole(model: GPTModel) -> Iterator[None]:
    """Hide the tensor-parallel tag of the experts, by which mbridge would gather what no rank has split.

    The tag is there because it makes every rank count its experts in the gradient norm.
    """
    experts = [p for p in model.parameters() if getattr(p, "whole_expert", False)]
    for parameter in experts:
        parameter.tensor_model_parallel = False
    try:
        yield
    finally:
        for parameter in experts:
            parameter.tensor_model_parallel = True


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
