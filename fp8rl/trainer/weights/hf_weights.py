"""Loads a model's weights from a Hugging Face checkpoint, and writes them to one, on any parallel layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from fp8rl.models import Model
from fp8rl.models.checkpoint.peft import write_adapter
from fp8rl.models.checkpoint.reading import check_finite, kept_tensors, stored_files
from fp8rl.models.checkpoint.stored import WeightFiles
from fp8rl.models.checkpoint.writing import copy_beside_weights, write_directory
from fp8rl.models.shared_base import SharedBase
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.core.memory import own_memory
from fp8rl.numerics.core.process import all_gathered, exhaust, rank, together
from fp8rl.numerics.quantize import NamedWeight, QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from fp8rl.numerics.weight_cache import Frozen, WeightCache, freeze
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.modules.weights import matrices, named_weights
from fp8rl.trainer.weights.export import Exporter


class HFWeights(Exporter):
    """Loads a model's parameters from its Hugging Face checkpoint at `path`, exports them, and writes another one."""

    def __init__(
        self,
        model_path: Path,
        definition: Model,
        quantized_as: TensorSpec,
        cache: WeightCache,
        layout: Layout,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(definition, quantized_as, cache, layout)
        self.path, self._dtype = Path(model_path), dtype

    @torch.no_grad()
    def load(self, model: GPTModel, names: Collection[str] | None = None) -> None:
        """Fill the model from the directory's safetensors files. names: fill only these parameters."""
        files, whole = stored_files(self.path), self.whole(model)
        for name, parameter in self._held(model):
            if names is not None and name not in names:
                continue
            named, quantized = whole(name), te_runtime.is_quantized(parameter)
            part = self.part(named, lambda row: files.read(row.name), self._megatron.axis(named, parameter))
            part = part.to(parameter.device, self._dtype if quantized else parameter.dtype)
            check_finite(" and ".join(row.name for row in self.rows_of(named)), part)
            if quantized:
                te_runtime.fill(parameter, part)
            else:
                parameter.copy_(part)

    def adopt(self, model: GPTModel, base: SharedBase, waits: bool = False) -> int:
        """Let the model's frozen parameters read their values from a base. Return the bytes of parameters that cannot.

        waits: the model is not loaded yet, so also load the other parameters.
        """
        self._base = base
        whole = self.whole(model)
        frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        parts = {name: [one for one, _ in matrices(name, p)] for name, p in frozen}
        kept = [(name, p) for name, p in frozen if not self._adopts(p, [whole(one) for one in parts[name]], base)]
        if waits:
            for _, parameter in kept:
                own_memory(parameter)
            self.load(model, {*(one for name, _ in kept for one in parts[name]), *dict(self._buffers(model))})
        return sum(parameter.nbytes for _, parameter in kept)

    # FP8 products read the base's codes (`weight_cache.Frozen`); each call takes the rank's part of them, in Megatron's
    # order of rows. A weight that is not quantized becomes a view of the base if the base has the same numbers in the
    # same order. Otherwise it keeps memory of its own: a fused q|k|v in BF16, a part of a row-parallel weight, another
    # dtype.

    def _adopts(self, parameter: nn.Parameter, names: Sequence[str], base: SharedBase) -> bool:
        """Let a frozen parameter read its values from a base, which engines read too. Return False if it cannot.

        names: the parameter's name in the whole model or, for stacked experts, each expert's name.
        """
        in_table = all(name in base.model.tensors.in_megatron for name in names)
        rows = [self.rows_of(name) for name in names] if in_table else []
        if not rows or rows[0][0].name not in base.tensors:
            return False
        stored = base.fused(rows[0], len(rows) if parameter.dim() == 3 else 0)
        axis = self._megatron.axis(names[0], parameter)
        if isinstance(stored, QuantizedTensor):
            freeze(parameter, self._frozen(stored, names[0], axis))
            return True
        ranks, rank = (1, 0) if axis is None else (self._layout.tp_size, self._layout.tp_rank)
        view = stored if axis is None else stored.chunk(ranks, axis)[rank]
        alike = (view.shape, view.dtype) == (parameter.shape, parameter.dtype) and view.is_contiguous()
        if rows[0][0].megatron.layout == "heads" or len(rows[0]) > 1 < ranks or not alike:
            return False
        parameter.data = view
        return True

    def _frozen(self, held: QuantizedTensor, name: str, axis: int | None) -> Frozen:
        """Return this rank's part of the codes of a parameter. axis: as in `part`."""
        ranks, rank = (1, 0) if axis is None else (self._layout.tp_size, self._layout.tp_rank)
        if axis == 1:
            return Frozen(held).chunk(ranks, -1)[rank]
        rows, block = self.rows_of(name), held.spec.group
        if ranks == 1 and rows[0].megatron.layout == "rows":
            return Frozen(held)
        blocks = torch.arange(held.data.shape[-2] // block, device=held.data.device)
        pieces = list(blocks.split([row.shape[0] // block for row in rows]))
        order = self._scales.share(name, self._scales.fuse(name, pieces), axis, ranks)[rank]
        return Frozen(held, order.contiguous(), block)

    def rows(self, model: GPTModel) -> dict[str, Sequence[TensorRow]]:
        """Return for each of this rank's weights and buffers the checkpoint's tensors in it, whole or in part."""
        whole = self.whole(model)
        return {name: self.rows_of(whole(name)) for name, _ in self._held(model)}

    def rows_of(self, name: str) -> Sequence[TensorRow]:
        """Return the checkpoint's tensors in a matrix. name: the matrix's name in the whole model."""
        return self._megatron.rows(name)

    def part(self, name: str, values: Callable[[TensorRow], Tensor], axis: int | None) -> Tensor:
        """Fill a matrix with `values(row)` for each checkpoint tensor in it, and return this rank's part of the matrix.

        name: the matrix's name in the whole model. axis: the axis on which ranks split it. None: they do not split it.
        """
        whole = self._megatron.fuse(name, [values(row) for row in self.rows_of(name)])
        return self._megatron.share(name, whole, axis, self._layout.tp_size)[self._layout.tp_rank]

    def _held(self, model: GPTModel) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of this rank's weights and buffers."""
        yield from named_weights(model)
        yield from self._buffers(model)

    def write(self, model: GPTModel, path: Path) -> None:
        """Write a Hugging Face directory with dequantized weights. Copy the source's other files and unused tensors."""
        kept = kept_tensors(self.path, self._definition) if rank() == 0 else ()
        source = stored_files(self.path)
        tensors = chain(self._plain(self.share(model), source), kept)
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

    def _plain(self, weights: Iterator[NamedWeight], source: WeightFiles | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, dequantized. source: files that may have FP32 tensors in BF16. Such a tensor is converted
        to BF16 if no value changes."""
        try:
            for name, weight in weights:
                if isinstance(weight, QuantizedTensor):
                    weight = weight.dequantize(self._dtype)
                elif source and self._table[name].trained == torch.float32 and source.described(name)[1] == "BF16":
                    narrow = weight.bfloat16()
                    weight = narrow if torch.equal(narrow.float(), weight) else weight
                yield name, weight
        finally:
            exhaust(weights)
