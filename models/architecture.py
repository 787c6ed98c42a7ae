"""What an architecture says of itself, and the registry of those that are known."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import models
from models.config_file import ConfigFile
from models.sizes import ModelSizes
from models.tensors import TensorRow, TensorTable
from models.trace import Forward
from numerics.spec import QuantSpec

MOST_EXPERTS = 1 << 20
"""Of a model: its table would take minutes to make before a tensor is missed."""


@dataclass(frozen=True)
class Architecture:
    """One architecture of Hugging Face models.

    Attributes:
        name: in `architectures` of config.json. model_type: that goes with it.
        sizes: reads a config.json, or says what the shared ops do not define.
        tensors: the rows of a model of these sizes, in the order of its forward.
        forward: its ops.
        engine_extras: last parts of names of the engine's parameters that are no weights of the checkpoint.
    """

    name: str
    model_type: str
    sizes: Callable[[ConfigFile], ModelSizes]
    tensors: Callable[[ModelSizes], Iterator[TensorRow]]
    forward: Callable[[ModelSizes], Forward]
    engine_extras: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Model:
    """An architecture in the sizes of one model."""

    architecture: Architecture
    sizes: ModelSizes

    @functools.cached_property
    def tensors(self) -> TensorTable:
        return TensorTable(self.architecture.tensors(self.sizes), self.sizes.kv_heads)

    @functools.cached_property
    def forward(self) -> Forward:
        return self.architecture.forward(self.sizes)

    def quantizes(self, row: TensorRow, spec: QuantSpec) -> bool:
        """Whether a tensor of the table is in FP8 under `spec`."""
        if row.kind is None or row.layer is None:
            return False
        return spec.of_layer(row.layer, self.sizes.layers).quantizes(row.kind)


_known: dict[str, Architecture] = {}


def register(architecture: Architecture) -> None:
    """Make an architecture known in this process. Those of modules in this package, as ARCHITECTURE, are."""
    _known[architecture.name] = architecture


def read_model(path: Path, key: str = "model.path", *, served: bool = False) -> Model:
    """The model of a Hugging Face directory, by its config.json; messages speak of the directory as `key`.

    served: it is quantized, as an engine loads it.

    Raises:
        UserError: no readable config, an unknown architecture, or a variant that the shared ops do not define.
    """
    config = ConfigFile.read(Path(path), key)
    known = architectures()
    choice = " or ".join(known)
    name = config.architecture(choice)
    if name not in known:
        raise config.refusal("architectures", name, choice, f"Choose a model of {choice}.")
    architecture = known[name]
    config.expect("model_type", architecture.model_type, f"as for {name}")
    if not served:
        config.refuse_quantized()
    sizes = architecture.sizes(config)
    if sizes.layers * max(1, sizes.experts) > MOST_EXPERTS:
        expected = f"at most {MOST_EXPERTS} layers, or experts in all of them"
        raise config.refusal("num_hidden_layers", sizes.layers, expected)
    return Model(architecture, sizes)


def architectures() -> dict[str, Architecture]:
    """All that are known, by name."""
    for module in pkgutil.iter_modules(models.__path__):
        architecture = getattr(import_module(f"models.{module.name}"), "ARCHITECTURE", None)
        if architecture is not None:
            _known.setdefault(architecture.name, architecture)
    return dict(_known)
