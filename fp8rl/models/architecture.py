"""Describes architectures and models, and keeps the registry of known architectures."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import fp8rl.models.architectures as ours
from fp8rl.models.adapters import AdapterSection, adapter_rows, check_adapter
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import FIRST_OPS, LAST_OPS, Family, first_tensors, last_tensors
from fp8rl.models.multimodal import Multimodal
from fp8rl.models.program import Forward
from fp8rl.models.shape import Shape
from fp8rl.models.sizes import ModelSizes, check_sizes
from fp8rl.models.tensors import TensorRow, TensorTable
from fp8rl.numerics.core.errors import UserError, shown
from fp8rl.numerics.core.files import module_of_file
from fp8rl.numerics.spec import ALL, QuantSpec

Role = Literal["policy", "reference", "critic", "teacher"]
"""What a model is for in a run. `policy`: samples and learns. `reference`: has earlier weights of the policy, to
measure how far it has moved. `critic`: predicts rewards. `teacher`: another model that scores the policy's answers."""

MOST_EXPERTS = 1 << 20
"""The most experts that a model may have. Without a limit, a wrong config.json would be noticed only after minutes."""
_HOW_TO_ADD = (
    "Describe it in a file of your own, and set model.architecture=path/to/file.py; docs/models.md, 'How to add the "
    "next', says how."
)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture of Hugging Face models: how its sizes are read, and the families of ops that it consists of."""

    name: str
    """The architecture's name in `architectures` of config.json."""
    model_type: str
    """The value of `model_type` in config.json."""
    sizes: Callable[[ConfigFile], ModelSizes]
    """A function that reads the sizes in a config.json, and refuses variants that are not supported."""
    families: tuple[Family, ...]
    """The families of ops in the order of a layer's forward. Each says which layers have it."""
    engine_config: Callable[[dict[str, Any], ModelSizes], dict[str, Any]] = lambda config, sizes: config
    """A function that turns a config.json into the form that SGLang reads."""
    any_heads: Mapping[str, Any] = field(default_factory=dict)
    """Values for config.json that describe an equal model of another architecture, which may have any number of heads.
    Needed if transformers demands that the number of heads divides `hidden_size`."""
    aliases: tuple[str, ...] = ()
    """Other values of `model_type`, which older versions of transformers do not know."""
    multimodal: Multimodal | None = None
    """How multimodal checkpoints hold this text model together with an image encoder; None: there are none."""

    @property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        """The module kinds that a quantization spec can name; kinds that one matrix product fuses share a tuple."""
        return tuple(kinds for family in self.families for kinds in family.kinds)


@dataclass(frozen=True)
class Model:
    """One model: its architecture, its sizes, and its adapters if it has any."""

    architecture: Architecture
    sizes: ModelSizes
    adapter: AdapterSection | None = None

    @property
    def multimodal(self) -> Multimodal | None:
        """Return how the checkpoint holds the model together with an image encoder; None: it has no image encoder."""
        return self.architecture.multimodal if self.sizes.tower else None

    @functools.cached_property
    def shape(self) -> Shape:
        adapters = tuple(row for row in self.tensors.rows.values() if row.adapts is not None) if self.adapter else ()
        return Shape(self.sizes, self.architecture.families, adapters)

    @functools.cached_property
    def families(self) -> list[list[Family]]:
        """The families of ops of each layer, in the order of its forward pass."""
        sizes, known = self.sizes, self.architecture.families
        return [[family for family in known if family.within(sizes, layer)] for layer in range(sizes.layers)]

    @functools.cached_property
    def tensors(self) -> TensorTable:
        """The rows of the model and its adapters, in the order of its forward."""
        sizes = self.sizes
        layers = (family.tensors(sizes, layer) for layer, found in enumerate(self.families) for family in found)
        rows = [*first_tensors(sizes), *chain.from_iterable(layers), *last_tensors(sizes)]
        adapters = adapter_rows(rows, self.adapter) if self.adapter else ()
        return TensorTable((*rows, *adapters), sizes.kv_heads // sizes.joined)

    @functools.cached_property
    def forward(self) -> Forward:
        ops = (tuple(op for family in found for op in family.ops(self.sizes)) for found in self.families)
        return Forward(FIRST_OPS, tuple(ops), LAST_OPS)

    def adapted(self, adapter: AdapterSection | None) -> Model:
        """Return the model with these adapters. Raises UserError, as :func:`models.adapters.check_adapter` does, if the
        model cannot have them."""
        if adapter is not None:
            check_adapter(self.tensors.rows.values(), adapter)
        return replace(self, adapter=adapter)

    def quantizes(self, row: TensorRow, spec: QuantSpec) -> bool:
        """Return whether a tensor of the table is in FP8 under `spec`."""
        if row.kind is None or row.layer is None:
            return False
        return spec.of_layer(row.layer, self.sizes.layers).quantizes(row.kind)


_known: dict[str, Architecture] = {}


def register(architecture: Architecture) -> None:
    """Make an architecture known in this process. Those in `models.architectures` are known anyway."""
    _known[architecture.name] = architecture


def load_architecture(path: str, key: str = "model.architecture") -> Architecture:
    """Make the ARCHITECTURE of a user's file known in this process. It replaces an architecture of ours with the same
    name. Raises UserError, which names `key`, if the file cannot be read or imported, or has no ARCHITECTURE."""
    try:
        found = getattr(module_of_file(path, key), "ARCHITECTURE", None)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever a module may raise while it is imported, sys.exit() included
        raise _no_architecture(path, key, f"a module that ends in {type(error).__name__}: {error}") from error
    if not isinstance(found, Architecture):
        raise _no_architecture(path, key, f"ARCHITECTURE = {shown(found)}")
    register(found)
    return found


def _no_architecture(path: str, key: str, found: str) -> UserError:
    expected = "a file with ARCHITECTURE = models.Architecture(...)"
    return UserError(f"{key}: found {found} in {path}, expected {expected}. {_HOW_TO_ADD}")


def read_model(path: Path, key: str = "model.path", *, served: bool = False) -> Model:
    """Read the model of a Hugging Face directory, by its config.json; messages call the directory `key`.

    served: the directory is for an engine, so its weights may be quantized.

    Raises UserError: no readable config, an unknown architecture, or a variant that is not supported.
    """
    return model_of(ConfigFile.read(Path(path), key), served=served)


def model_of(config: ConfigFile, *, served: bool = False) -> Model:
    """Return the model that a config.json describes; raises as :func:`read_model` does."""
    known = architectures()
    multimodals = {each.multimodal.name: each for each in known.values() if each.multimodal is not None}
    choice = " or ".join((*known, *multimodals))
    name = config.architecture(choice)
    if (architecture := known.get(name) or multimodals.get(name)) is None:
        raise config.refusal("architectures", name, choice, _HOW_TO_ADD)
    multimodal = architecture.multimodal if name in multimodals else None
    pictures: tuple[int, ...] = ()
    if multimodal is not None:
        config.expect("model_type", multimodal.model_type, f"as for {name}")
        pictures = tuple(config.count(key) for key in multimodal.pictures if config.count(key))
        config = config.inner(multimodal.text, multimodal.shared)
    if config.model_type() in architecture.aliases:
        config.refuse_unknown_alias(architecture.model_type)
    else:
        config.expect("model_type", architecture.model_type, f"as for {name}")
    if not served:
        config.refuse_quantized()
    sizes = architecture.sizes(config)
    check_sizes(config, sizes)
    if sizes.layers * max(1, sizes.experts) > MOST_EXPERTS:
        expected = f"at most {MOST_EXPERTS} layers, or experts in all layers"
        raise config.refusal("num_hidden_layers", sizes.layers, expected)
    if multimodal is not None:
        sizes = replace(sizes, kept=(*sizes.kept, *multimodal.towers), tower=multimodal.name, picture_tokens=pictures)
    return Model(architecture, sizes)


def text_config(path: Path) -> dict[str, Any]:
    """Return the config.json of a directory's text model, as a checkpoint without an image encoder would have it."""
    config = ConfigFile.read(path, "model.path")
    model = model_of(config, served=True)
    if (multimodal := model.multimodal) is None:
        return config.values
    alone = {"architectures": [model.architecture.name], "model_type": model.architecture.model_type}
    kept = {name: config.values[name] for name in ("dtype", "torch_dtype") if name in config.values}
    return kept | config.inner(multimodal.text, multimodal.shared).values | alone


def read_shape(path: Path, key: str = "model.path", adapter: AdapterSection | None = None) -> Shape:
    """Read the shape of a Hugging Face directory's model from config.json alone; messages call the directory `key`.

    adapter: the adapters that are trained in place of the weights. The shape does not depend on whether the weights are
    quantized. Draft layers (multi-token prediction) are not counted.

    Raises UserError: no readable config, an unknown architecture, a value that is missing or wrong, or an adapter that
    the model cannot have.
    """
    return read_model(path, key, served=True).adapted(adapter).shape


def check_scope(spec: QuantSpec) -> None:
    """Check that the scope of a spec names module kinds of known architectures. Raises UserError if it does not, or if
    it names only some of the kinds that are fused."""
    if spec.scope == ALL:
        return
    fused = sorted({kinds for architecture in architectures().values() for kinds in architecture.kinds})
    unknown = sorted(set(spec.scope).difference(*fused))
    if unknown:
        raise UserError(f"scope: found {unknown}, expected names out of {[kind for kinds in fused for kind in kinds]}")
    for kinds in fused:
        if 0 < len(found := spec.scope & set(kinds)) < len(kinds):
            raise UserError(
                f"scope: found {sorted(found)} without the rest of {list(kinds)}; "
                "one GEMM reads them fused, so name all of them or none"
            )


def architectures() -> dict[str, Architecture]:
    """Return all known architectures by name."""
    for module in pkgutil.iter_modules(ours.__path__):
        architecture = import_module(f"{ours.__name__}.{module.name}").ARCHITECTURE
        _known.setdefault(architecture.name, architecture)
    return dict(_known)
