"""Loads a model's weights from a Hugging Face checkpoint, and exports them to one, on any parallel layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from fp8rl.models import Model
from fp8rl.models.checkpoint.peft import write_adapter
from fp8rl.models.checkpoint.reading import check_finite, kept_tensors, stored_files
from fp8rl.models.checkpoint.stored import WeightFiles
from fp8rl.models.checkpoint.writing import copy_beside_weights, write_directory
from fp8rl.models.shared_base import SharedBase
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.memory import own_memory
from fp8rl.numerics.core.process import all_gathered, exhaust, rank, together
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from fp8rl.numerics.weight_cache import WeightCache, frozen_of
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.modules.weights import beside, is_adapter, matrices, named_weights
from fp8rl.trainer.weights.export import Exporter, MegatronWeights, adopt


class HFWeights:
    """Converts between a model's parameters and the tensors of its Hugging Face checkpoint at `path`.

    Every method needs all ranks. A weight that TransformerEngine stores in FP8 is converted as two matrices: its codes
    [N, K] and its scales [N / block, K / block].

    quantized_as: the spec of weights in FP8. cache: gives the tensor that engines get for a weight.
    """

    def __init__(
        self,
        model_path: Path,
        definition: Model,
        quantized_as: TensorSpec,
        cache: WeightCache,
        layout: Layout,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.path, self._spec, self._dtype = Path(model_path), quantized_as, dtype
        self._definition, self._table, self._cache = definition, definition.tensors, cache
        self._megatron = MegatronWeights(self._table)
        self._scales, self._layout = MegatronWeights(self._table, quantized_as.group), layout
        self._exporter = Exporter(self._megatron, self._scales, quantized_as, layout)
        self._base: SharedBase | None = None

    @torch.no_grad()
    def load(self, model: GPTModel, names: Collection[str] | None = None) -> None:
        """Fill the model from the directory's safetensors files. names: fill only these parameters."""
        if not any(self.path.glob("*.safetensors")):
            remedy = "Download the weights, or convert them to safetensors."
            raise user_error("model.path", str(self.path), "a model directory with *.safetensors weights", remedy)
        files, whole = stored_files(self.path), self.whole_names(model)
        for name, parameter in self._held(model, whole):
            if names is not None and name not in names:
                continue
            named, quantized = whole[name], te_runtime.is_quantized(parameter)
            part = self.part(named, lambda row: files.read(row.name), self._megatron.axis(named, parameter))
            part = part.to(parameter.device, self._dtype if quantized else parameter.dtype)
            check_finite(" and ".join(row.name for row in self.rows_of(named)), part)
            if quantized:
                te_runtime.fill(parameter, part)
            else:
                parameter.copy_(part)

    def share(self, model: GPTModel) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Yield the (HF name, tensor) pairs of this rank's shard. The shards of all ranks together are the checkpoint.

        A weight that TransformerEngine stores in FP8 is yielded in FP8. Use or copy the tensors before the next
        training step, because they may share memory with the parameters. All ranks must iterate to the end.
        """
        return self._exporter.share(self._served(model), self._base)

    def adopt(self, model: GPTModel, base: SharedBase, waits: bool = False) -> int:
        """Let the model's frozen parameters read their values from a base. Return the bytes of parameters that cannot.

        See :func:`trainer.weights.export.adopt`. waits: the model is not loaded yet, so also load the other parameters.
        """
        self._base = base
        whole = self.whole_names(model)
        frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        parts = {name: [one for one, _ in matrices(name, p)] for name, p in frozen}
        kept = [
            (name, p)
            for name, p in frozen
            if not adopt(p, [whole[one] for one in parts[name]], base, self._scales, self._layout)
        ]
        if waits:
            for _, parameter in kept:
                own_memory(parameter)
            self.load(model, {*(one for name, _ in kept for one in parts[name]), *dict(self._buffers(model, whole))})
        return sum(parameter.nbytes for _, parameter in kept)

    def base(self, model: GPTModel) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Yield this rank's shard of the weights, without separate or merged adapters."""
        whole = self.whole_names(model)
        parts = (part for name, weight in self._weights(model, whole) for part in matrices(name, weight))
        return self._exporter.share(((whole[name], part, part.detach()) for name, part in parts), self._base)

    def adapters(self, model: GPTModel) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Yield this rank's shard of the adapters."""
        whole = self.whole_names(model)
        parts = ((name, part) for name, part in named_weights(model) if is_adapter(name))
        return self._exporter.share((whole[name], part, part.detach()) for name, part in parts)

    def rows(self, model: GPTModel) -> dict[str, Sequence[TensorRow]]:
        """Return for each of this rank's weights and buffers the checkpoint's tensors in it, whole or in part."""
        whole = self.whole_names(model)
        return {name: self.rows_of(whole[name]) for name, _ in self._held(model, whole)}

    def rows_of(self, name: str) -> Sequence[TensorRow]:
        """Return the checkpoint's tensors in a matrix. name: the matrix's name in the whole model."""
        return self._megatron.rows(name)

    def part(self, name: str, values: Callable[[TensorRow], Tensor], axis: int | None) -> Tensor:
        """Fill a matrix with `values(row)` for each checkpoint tensor in it, and return this rank's part of the matrix.

        name: the matrix's name in the whole model. axis: the axis on which ranks split it. None: they do not split it.
        """
        whole = self._megatron.fuse(name, [values(row) for row in self.rows_of(name)])
        return self._megatron.share(name, whole, axis, self._layout.tp_size)[self._layout.tp_rank]

    def _held(self, model: GPTModel, whole: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of this rank's weights and buffers."""
        yield from named_weights(model)
        yield from self._buffers(model, whole)

    def _served(self, model: GPTModel) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name in the whole model, this rank's tensor, tensor that engines get for it)."""
        whole = self.whole_names(model)
        for name, held in self._weights(model, whole):
            read_from_base = te_runtime.is_quantized(held) or (self._base is not None and frozen_of(held) is not None)
            served = held if read_from_base else self._cache.served(held)
            for (one, part), (_, in_its_place) in zip(matrices(name, held), matrices(name, served), strict=True):
                yield whole[one], part, in_its_place

    def _weights(self, model: GPTModel, whole: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers that are tensors of the checkpoint. Adapters are not among them."""
        yield from ((name, parameter) for name, parameter in model.named_parameters() if not is_adapter(name))
        yield from self._buffers(model, whole)

    def _buffers(self, model: GPTModel, whole: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, buffer) for name, buffer in model.named_buffers() if whole.get(name) in self._table.in_megatron)

    def whole_names(self, model: GPTModel) -> dict[str, str]:
        """Return the name in the whole model for each name of this rank's weights, adapters and buffers."""
        tensors = {**dict(named_weights(model)), **dict(model.named_buffers())}
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        first_expert = self._layout.ep_rank * (self._definition.sizes.experts // self._layout.ep_size)
        names: dict[str, str] = {}
        for name in (one for one in tensors if not is_adapter(one)):
            whole = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda found: str(layers[int(found[0])]), name)
            numbered = r"(?<=\.experts\.linear_fc[12]\.weight)\d+$"
            names[name] = re.sub(numbered, lambda found: str(first_expert + int(found[0])), whole)
        for name, whole in list(names.items()):
            for letter in ("a", "b"):
                if (adapter := beside(name, letter)) in tensors:
                    names[adapter] = beside(whole, letter)
                elif (of_all := adapter.rstrip("0123456789")) in tensors:
                    names[of_all] = beside(whole, letter).rstrip("0123456789")
        return names

    def write(self, model: GPTModel, path: Path) -> None:
        """Write a Hugging Face directory with dequantized weights. Copy the source's other files and unused tensors."""
        kept = kept_tensors(self.path, self._definition) if rank() == 0 else ()
        source = stored_files(self.path)
        tensors = chain(self._as_stored(self._plain(self.share(model)), source), kept)
        pieces = source.pieces if self._definition.multimodal is not None else None
        write_directory(Path(path).absolute(), tensors, self._copy_description, pieces, self._dtype)

    def write_adapters(self, model: GPTModel, path: Path, base: Path | None = None) -> None:
        """Write the adapters as a directory in PEFT's format.

        base: the model directory that it names as its base. None: the directory from which the model was read.
        """
        shares = all_gathered({name: tensor.cpu() for name, tensor in self._plain(self.adapters(model))})
        tensors = {name: tensor for share in shares for name, tensor in share.items()}
        together(lambda: write_adapter(path, tensors, self._definition, base or self.path) if rank() == 0 else None)

    def _copy_description(self, partial: Path) -> None:
        """Copy the source's files that have no weights. Remove from config.json that the weights are in FP8."""
        copy_beside_weights(self.path, partial)
        config = json.loads((partial / "config.json").read_text())
        places = [config, *(value for value in config.values() if isinstance(value, dict))]
        found = [place.pop("quantization_config") for place in places if "quantization_config" in place]
        if found:
            (partial / "config.json").write_text(json.dumps(config, indent=1))

    def _as_stored(self, weights: Iterator[tuple[str, Tensor]], source: WeightFiles) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors. If the source has an FP32 tensor in BF16, convert it to BF16 if no value changes."""
        try:
            for name, weight in weights:
                if self._table[name].trained == torch.float32 and source.described(name)[1] == "BF16":
                    narrow = weight.bfloat16()
                    weight = narrow if torch.equal(narrow.float(), weight) else weight
                yield name, weight
        finally:
            exhaust(weights)

    def _plain(self, weights: Iterator[tuple[str, Tensor | QuantizedTensor]]) -> Iterator[tuple[str, Tensor]]:
        try:
            for name, weight in weights:
                yield name, weight.dequantize(self._dtype) if isinstance(weight, QuantizedTensor) else weight
        finally:
            exhaust(weights)
