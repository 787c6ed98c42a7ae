"""Tables of tensors for tests that need names rather than a model."""

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fp8rl.models.adapters import adapter_rows
from fp8rl.models.architecture import Architecture, Model, architectures, read_model
from fp8rl.models.families import FIRST_OPS, LAST_OPS, attention, first_tensors, last_tensors, mlp
from fp8rl.models.families.attention import attention_tensors
from fp8rl.models.families.mlp import dense_tensors, moe_tensors
from fp8rl.models.program import Forward
from fp8rl.models.shape import Shape
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow, TensorTable
from tests.support.tiny_model import TinyModel, write_tiny_model

SIZES = ModelSizes(
    layers=4, hidden_size=256, heads=4, kv_heads=2, head_dim=128, rotary_dim=128, vocab_size=64, norm_eps=1e-6,
    rope_theta=1e4, max_positions=512, tied=False, ffn_size=384, experts=12, top_k=2, expert_size=128,
)  # fmt: skip


def shape_of(sizes: ModelSizes) -> Shape:
    """The shape of a model of these sizes, with grouped-query attention."""
    return Shape(sizes, (attention.FAMILY, mlp.DENSE, mlp.MOE))


@functools.cache
def tiny_models() -> dict[str, Model]:
    """A tiny model of every architecture that is known, by its name: a new one is tested by being there."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="fp8rl-tiny-") as folder:
        for name, architecture in architectures().items():
            dense = not any(family.name == "experts" for family in architecture.families)
            family = "qwen3" if architecture.model_type == "qwen3_moe" else architecture.model_type
            sizes = {"layers": 3, "hidden": 512, "heads": 4, "kv_heads": 4, "intermediate": 256}
            shape = TinyModel(**sizes, experts=0 if dense else 8, family=family)
            write_tiny_model(Path(folder, name), shape)
            found[name] = read_model(Path(folder, name))
    return found


@dataclass(frozen=True, kw_only=True)
class Listed(Model):
    """A model whose rows a test says, without an op in its layers."""

    rows: Callable[[ModelSizes], Iterator[TensorRow]]
    forward = Forward(FIRST_OPS, (), LAST_OPS)

    @functools.cached_property
    def tensors(self) -> TensorTable:
        rows = [*self.rows(self.sizes)]
        return TensorTable((*rows, *(adapter_rows(rows, self.adapter) if self.adapter else ())), self.sizes.kv_heads)


def listed(name: str, sizes: ModelSizes, rows: Callable[[ModelSizes], Iterator[TensorRow]]) -> Model:
    """A model of these rows."""
    return Listed(Architecture(name=name, model_type=name, sizes=lambda _: sizes, families=()), sizes, rows=rows)


def without_norms(rows: Iterator[TensorRow]) -> Iterator[TensorRow]:
    """All but the norm before a part of a layer."""
    return (row for row in rows if row.op not in ("post_norm",))


def every_tensor(layers: int) -> Model:
    """A model whose layers have attention, experts and a dense MLP beside each other."""

    def rows(sizes: ModelSizes) -> Iterator[TensorRow]:
        yield from first_tensors(sizes)
        for layer in range(sizes.layers):
            yield from attention_tensors(sizes, layer)
            yield from without_norms(moe_tensors(sizes, layer))
            yield from without_norms(dense_tensors(sizes, layer))
        yield from last_tensors(sizes)

    return listed("EveryTensor", replace(SIZES, layers=layers), rows)
