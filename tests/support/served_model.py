"""A module tree with FP8 parameters where SGLang keeps them, and the HF tensors that are in it."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from fp8rl.models import Model
from fp8rl.models.families import first_tensors, last_tensors
from fp8rl.models.families.attention import attention_tensors
from fp8rl.models.families.mlp import dense_tensors, moe_tensors
from fp8rl.models.shared_base import SharedBase, base_bytes
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.manifest import Recorder, ShardDigests
from fp8rl.weight_sync.served import served_tensors
from tests.support import definitions
from tests.support.definitions import listed, without_norms

SPEC = QuantSpec.preset("fp8_block_pow2")
HEADS, KEY_HEADS, HEAD_DIM, HIDDEN, WIDTH, EXPERTS = 4, 2, 128, 256, 128, 3
VOCABULARY, PADDED_VOCABULARY = 60, 64
ATTENTION, MOE, DENSE = "model.layers.0.self_attn.", "model.layers.0.mlp.", "model.layers.1.mlp."
SIZES = replace(
    definitions.SIZES, layers=2, vocab_size=VOCABULARY, ffn_size=2 * WIDTH, experts=EXPERTS, expert_size=WIDTH
)


def _rows(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield from first_tensors(sizes)
    yield from attention_tensors(sizes, 0)
    yield from without_norms(moe_tensors(sizes, 0))
    yield from without_norms(dense_tensors(sizes, 1))
    yield from last_tensors(sizes)


DEFINITION = listed("Served", SIZES, _rows)


def hf_tensors_served(seed: int) -> dict[str, Tensor]:
    """HF name -> what is served for it: FP8 codes and scales, or BF16. Blocks have different scales."""
    generator = torch.Generator().manual_seed(seed)

    def random(shape: tuple[int, ...]) -> Tensor:
        spread = torch.exp2(torch.randint(-4, 5, (-(-shape[0] // 128),), generator=generator))
        rows = spread.repeat_interleave(128)[: shape[0]]
        return (torch.randn(shape, generator=generator) * (rows[:, None] if len(shape) > 1 else rows)).bfloat16()

    tensors = ((name, random(row.shape)) for name, row in DEFINITION.tensors.rows.items())
    return dict(served_tensors(tensors, SPEC, DEFINITION))


def build(served: dict[str, Tensor]) -> nn.Module:
    """The module tree, filled with `served`."""
    root = nn.Module()
    for name in ("model.embed_tokens", "lm_head"):
        _add(module_at(root, name), "weight", _padded(served[f"{name}.weight"]))
    norms = ("model.layers.0.input_layernorm", ATTENTION + "q_norm", ATTENTION + "k_norm", "model.norm")
    for name in (*norms, MOE + "gate"):
        _add(module_at(root, name), "weight", served[name + ".weight"])
    qkv = module_at(root, ATTENTION + "qkv_proj")
    experts = module_at(root, MOE + "experts")
    for suffix in ("weight", "weight_scale_inv"):
        _add(qkv, suffix, torch.cat([_bytes(served[f"{ATTENTION}{k}_proj.{suffix}"]) for k in "qkv"]), suffix)
        _add(module_at(root, ATTENTION + "o_proj"), suffix, served[f"{ATTENTION}o_proj.{suffix}"])
        gate_up = [_bytes(served[f"{DENSE}{kind}_proj.{suffix}"]) for kind in ("gate", "up")]
        _add(module_at(root, DENSE + "gate_up_proj"), suffix, torch.cat(gate_up), suffix)
        _add(module_at(root, DENSE + "down_proj"), suffix, served[f"{DENSE}down_proj.{suffix}"])
        for name, kinds in (("w13", ("gate", "up")), ("w2", ("down",))):
            matrices = [
                torch.cat([_bytes(served[f"{MOE}experts.{e}.{kind}_proj.{suffix}"]) for kind in kinds])
                for e in range(EXPERTS)
            ]
            _add(experts, f"{name}_{suffix}", torch.stack(matrices), suffix)
    return root


def load(model: nn.Module, served: dict[str, Tensor]) -> None:
    """Write `served` into the parameters in place, as an update does."""
    for parameter, source in zip(model.parameters(), build(served).parameters(), strict=True):
        _bytes(parameter.data).copy_(_bytes(source.data))


def module_at(root: nn.Module, path: str) -> nn.Module:
    """The module of this name, made with those on the way to it where they are not there."""
    for part in path.split("."):
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


def base_of(tensors: dict[str, Tensor]) -> SharedBase:
    """A base that holds these."""
    base = SharedBase(torch.zeros(base_bytes(DEFINITION, SPEC), dtype=torch.uint8), DEFINITION, SPEC)
    for name, tensor in tensors.items():
        base.tensors[name].copy_(tensor)
    return base


def recorded(tensors: dict[str, Tensor], model: Model = DEFINITION, ranks: int = 1) -> ShardDigests:
    """What the trainer knows of a sync in which it has sent these."""
    recorder = Recorder(model.tensors, ranks)
    list(recorder.watch(tensors.items()))
    return recorder.sent()


def _add(module: nn.Module, name: str, value: Tensor, suffix: str = "") -> None:
    if suffix == "weight":
        value = value.view(SPEC.weight.dtype)
    module.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))


def _padded(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_full((PADDED_VOCABULARY - VOCABULARY, HIDDEN), 7.0)])


def _bytes(tensor: Tensor) -> Tensor:
    """FP8 codes as bytes, which torch can concatenate and compare; anything else as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == SPEC.weight.dtype else tensor
