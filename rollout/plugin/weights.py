"""The engine's own weights: what each parameter is called in the HF checkpoint, what it multiplies as, its digest.

`commit` is the one place where the operands of the products are made anew, digests taken and the version set. Between
an update and its commit the weights have no version and no forward runs on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from numerics import ops
from numerics.digest import tensor_digests
from numerics.names import SCALE_SUFFIX
from numerics.quantize import QuantizedTensor
from numerics.spec import TensorSpec


@dataclasses.dataclass(frozen=True)
class Operand:
    """What one FP8 parameter multiplies as (`ops.weight_operand`), and the weight version it was made from."""

    value: Any
    version: str


class ServedWeights:
    """The weights of the engine's model under an explicit version."""

    def __init__(self, spec: TensorSpec) -> None:
        self.version: str | None = None
        self._spec = spec
        self._model: nn.Module | None = None
        self._operands: dict[nn.Parameter, Operand] = {}

    @property
    def device(self) -> torch.device:
        return next(self._loaded().parameters()).device

    def attach(self, model: nn.Module, version: str) -> None:
        """Take charge of a model that has just been loaded."""
        self._model = model
        self._operands.clear()
        self.commit(version)

    def invalidate(self) -> None:
        """The parameters are being written: nothing may be computed with them until `commit`."""
        self.version = None
        self._operands.clear()

    def check(self) -> None:
        """Raises `RuntimeError` between an update and its commit."""
        if self.version is None:
            raise RuntimeError(
                "fp8rl plugin: found weights without a version before a forward, expected an update to be committed "
                "first; replace this engine"
            )

    def operand(self, parameter: nn.Parameter) -> Any:
        """What an FP8 parameter [N, K], or [experts, N, K], multiplies as at the current version.

        Raises `RuntimeError` if there is none of that version.
        """
        entry = self._operands.get(parameter)
        if entry is None or entry.version != self.version:
            found = entry.version if entry is not None else None
            raise RuntimeError(
                f"fp8rl plugin: a forward asked for weights of version {self.version}, and this parameter's "
                f"operand is of version {found}. An update was not committed; replace this engine"
            )
        return entry.value

    def commit(self, version: str) -> dict[str, str]:
        """Refresh everything derived from the parameters, set the version, and return the manifest.

        The manifest gives, for each tensor by its HF name, `digest` for what is served as it is, and `digest@version`
        for what is quantized, where `version` is that of the operand in use.
        """
        for module in self._loaded().modules():
            for name, parameter in _quantized_parameters(module):
                scale_inv = getattr(module, name + SCALE_SUFFIX).detach()
                quantized = QuantizedTensor(parameter.detach(), scale_inv, self._spec)
                self._operands[parameter] = Operand(ops.weight_operand(quantized), version)
        self.version = version
        return self.manifest()

    def manifest(self) -> dict[str, str]:
        """`commit`'s manifest, taken anew from the parameters as they are now."""
        names, parameters, views = zip(*hf_tensors(self._loaded()), strict=True)
        entries = dict(zip(names, tensor_digests(views), strict=True))
        for name, parameter in zip(names, parameters, strict=True):
            if operand := self._operands.get(parameter):
                entries[name] += f"@{operand.version}"
        return entries

    def _loaded(self) -> nn.Module:
        if self._model is None:
            raise RuntimeError("fp8rl plugin: no model is loaded yet")
        return self._model


def _quantized_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    own = dict(module.named_parameters(recurse=False))
    return ((name, p) for name, p in own.items() if name + SCALE_SUFFIX in own)


def hf_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """(HF name, the engine's parameter, the part of it that is this tensor), for every tensor of the HF checkpoint.

    SGLang stores q, k and v in one parameter, gate and up in another, and the experts of a layer stacked.
    """
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied embeddings
                continue
            seen.add(id(parameter))
            for hf_name, view in _split(module_name, module, name, parameter.detach()):
                yield hf_name, parameter, view


def _split(path: str, module: Any, name: str, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    parent, _, leaf = path.rpartition(".")
    if leaf == "qkv_proj":
        sizes = [module.num_heads * module.head_size] + 2 * [module.num_kv_heads * module.head_size]
        for kind, part in zip("qkv", _split_rows(data, sizes), strict=True):
            yield f"{parent}.{kind}_proj.{name}", part
    elif leaf == "gate_up_proj":
        for kind, part in zip(("gate", "up"), data.chunk(2), strict=True):
            yield f"{parent}.{kind}_proj.{name}", part
    elif name.startswith(("w13_", "w2_")):
        which, _, suffix = name.partition("_")
        for expert, matrix in enumerate(data):
            parts = zip(("gate", "up"), matrix.chunk(2), strict=True) if which == "w13" else (("down", matrix),)
            for kind, part in parts:
                yield f"{path}.{expert}.{kind}_proj.{suffix}", part
    elif hasattr(module, "org_vocab_size"):
        yield f"{path}.{name}", data[: module.org_vocab_size]  # SGLang pads the vocabulary
    else:
        yield f"{path}.{name}", data


def _split_rows(data: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """Rows of a weight, or block rows of its scales: sizes in proportion."""
    return data.split([size * data.shape[0] // sum(sizes) for size in sizes])
