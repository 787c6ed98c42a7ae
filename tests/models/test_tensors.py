"""The table of tensors: what each row says of the known architectures, and where tensors lie in a base."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fp8rl.models.architecture import Model, architectures, check_scope
from fp8rl.models.shared_base import SharedBase, parameter_spans
from fp8rl.models.tensors import EngineRank, Location, TensorRow, TensorTable
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import QuantSpec
from tests.support.definitions import SIZES, tiny_models
from tests.support.paths import ROOT
from tests.support.served_model import DEFINITION, EXPERTS, HIDDEN, SPEC, WIDTH, base_of, build, hf_tensors_served

EVERY = tiny_models()
DENSE, MOE = (
    Model(architectures()[name], sizes).tensors
    for name, sizes in (("Qwen3ForCausalLM", replace(SIZES, experts=0)), ("Qwen3MoeForCausalLM", SIZES))
)
LAYER = "model.layers.3."


def row(name: str, rows: int, **changes: object) -> TensorRow:
    """`rows` x 256, in the parameter `fused` of both sides."""
    made = TensorRow(name=name, shape=(rows, 256), op="op", engine=Location("fused"), megatron=Location("fused"))
    return replace(made, **changes)


def owners(part: torch.Tensor, labels: list[str], size: int) -> list[str]:
    """Of `size` rows each, numbered by `labels`, those that a part has."""
    return [labels[start // size] for start in part[::size, 0].tolist()]


def test_what_a_spec_quantizes_is_said_by_exact_name() -> None:
    expected = {
        **{f"{LAYER}self_attn.{p}_proj.weight": f"{p}_proj" for p in "qkvo"},
        **{f"{LAYER}mlp.{p}_proj.weight": f"{p}_proj" for p in ("gate", "up", "down")},
        **{f"{LAYER}mlp.experts.11.{p}_proj.weight": f"experts.{p}_proj" for p in ("gate", "up", "down")},
    }
    found = {name: table[name].kind for table in (DENSE, MOE) for name in expected.keys() & table.rows.keys()}
    assert found == expected
    unquantized = {"embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm"}
    unquantized |= {"q_norm", "k_norm", "gate"}  # "gate" is the router, which substring matching takes for gate_proj
    for table in (DENSE, MOE):
        others = {row.name.split(".")[-2] for row in table.rows.values() if row.kind is None}
        assert others == unquantized - ({"gate"} if table is DENSE else set())


@pytest.mark.parametrize("name", EVERY)
def test_module_kinds_are_those_of_the_table_and_fused_where_the_engine_fuses_them(name: str) -> None:
    fused = {
        tuple(row.kind for row in rows)
        for by_index in EVERY[name].tensors.in_engine.values()
        for rows in by_index.values()
        if rows[0].kind is not None
    }
    assert fused == set(EVERY[name].architecture.kinds)
    assert {weight.kind for weight in EVERY[name].shape.weights} - {None} <= {kind for kinds in fused for kind in kinds}


@pytest.mark.parametrize(("block", "ranks"), [(1, 1), (1, 2), (128, 1), (128, 2)])
def test_heads_are_interleaved_by_group(block: int, ranks: int) -> None:
    """Four query heads and two key-value heads of 128: Megatron's rows are q0 q1 k0 v0 q2 q3 k1 v1."""
    parameter = "decoder.layers.0.self_attention.linear_qkv.weight"
    rows = DENSE.in_megatron[parameter]
    size = 128 // block
    labels = ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"][: 8 // ranks]
    fused = torch.arange(len(labels) * size)[:, None]
    cut = DENSE.split(fused, rows, block, ranks)
    heads = (["q0", "q1", "q2", "q3"], ["k0", "k1"], ["v0", "v1"])
    assert [owners(part, labels, size) for part in cut] == [own[: len(own) // ranks] for own in heads]
    assert torch.equal(DENSE.fuse(cut, rows, block, ranks), fused)


@pytest.mark.parametrize(("block", "ranks"), [(1, 1), (1, 2), (128, 1), (128, 2)])
def test_parts_of_tensors_are_interleaved_by_head_and_shared_by_ranks_one_by_one(block: int, ranks: int) -> None:
    """Two heads: queries and keys of 128 in one tensor, gates of 256 in another; Megatron's rows are q0 k0 z0 q1 k1 z1,
    and an engine's rank r has qr kr zr."""
    there, here = Location("fused", layout="heads", groups=2), Location("fused", split=0)
    rows = [row("qk", 512, megatron=there, engine=here, parts=(256, 256)), row("z", 512, megatron=there, engine=here)]
    table, size = TensorTable(rows, groups=7), 128 // block
    labels = ["q0", "k0", "z0", "z0", "q1", "k1", "z1", "z1"][: 8 // ranks]
    fused = torch.arange(len(labels) * size)[:, None]
    cut = table.split(fused, rows, block, ranks)
    of_all, of_one = [["q0", "q1", "k0", "k1"], ["z0", "z0", "z1", "z1"]], [["q0", "k0"], ["z0", "z0"]]
    assert [owners(part, labels, size) for part in cut] == (of_all if ranks == 1 else of_one)
    assert torch.equal(table.fuse(cut, rows, block, ranks), fused)
    if ranks == 1:
        first, second = (EngineRank(rank, 2).part(rows[0], cut[0]) for rank in range(2))
        assert (owners(first, labels, size), owners(second, labels, size)) == (["q0", "k0"], ["q1", "k1"])
        assert torch.equal(rows[0].join([first, second]), cut[0])


def test_a_padded_parameter_ends_with_rows_of_no_tensor() -> None:
    ((*_, (part,)),) = DENSE.stacks({"model.embed_tokens.weight": torch.arange(70)}, 1, EngineRank())
    assert part.tolist() == list(range(64))
    with pytest.raises(ValueError, match="found a parameter of 63 rows, expected 64"):
        list(DENSE.stacks({"model.embed_tokens.weight": torch.arange(63)}, 1, EngineRank()))
    (norm,) = DENSE.in_megatron["decoder.final_layernorm.weight"]
    with pytest.raises(ValueError, match="model.norm.weight: found a parameter of 257 rows, expected 256"):
        DENSE.split(torch.arange(257), [norm])


def test_rows_that_are_no_whole_blocks_have_a_scale_of_their_own() -> None:
    """DeepSeek's fused a-projection: 1536 rows are 12 blocks, 576 are 4.5."""
    rows = [row("q_a", 1536), row("kv_a", 576)]
    held = {"fused": torch.zeros(2112, 2), "fused_scale_inv": torch.zeros(17, 2)}
    found = TensorTable(rows, groups=1).stacks(held, 128, EngineRank())
    assert [len(part) for *_, (part,) in found] == [1536, 576, 12, 5]


@pytest.mark.parametrize("block", [1, 128])
def test_the_ranks_of_an_engine_share_heads_and_widths_and_keep_experts_whole(block: int) -> None:
    ranks = [EngineRank(rank, 2) for rank in range(2)]
    for table in (model.tensors for model in EVERY.values()):
        for name, one in table.rows.items():
            if one.kind is None and block > 1:
                continue
            whole = torch.arange(-(-one.shape[0] // block) * 4).view(-1, 4)
            parts = [rank.part(one, whole) for rank in ranks]
            if one.engine.split is None:
                assert all(part is whole for part in parts)
                assert {rank.label(name, one) for rank in ranks} == {name}
                continue
            joined = one.join(parts) if one.parts else torch.cat(parts, one.engine.split)
            copied = one.engine.kv_heads == 1
            assert all(torch.equal(part, whole) for part in parts) if copied else torch.equal(joined, whole)
            assert [len(part) for part in parts] == [rank.rows(one, block) for rank in ranks]
            assert [rank.label(name, one) for rank in ranks] == [f"{name}#0/2", f"{name}#1/2"]


def test_more_ranks_than_key_value_heads_have_copies_of_them() -> None:
    """Two heads of 128 rows on four ranks: the first two have rows 0 to 127 and the first row of scales."""
    keys = row("k_proj", 256, engine=Location("fused", split=0, kv_heads=2))
    ranks = [EngineRank(rank, 4) for rank in range(4)]
    assert [rank.part(keys, torch.arange(256))[[0, -1]].tolist() for rank in ranks] == [[0, 127]] * 2 + [[128, 255]] * 2
    assert [rank.part(keys, torch.arange(2)).tolist() for rank in ranks] == [[0], [0], [1], [1]]
    assert [(rank.rows(keys), rank.rows(keys, 128)) for rank in ranks] == [(128, 1)] * 4
    assert [EngineRank(rank, 2).rows(keys) for rank in range(2)] == [128, 128]


def test_the_last_rank_has_what_is_left_of_a_padded_vocabulary() -> None:
    """100 tokens are 128 rows, 64 for each rank, of which the second has 36 that are tokens."""
    vocabulary = row("embed", 100, engine=Location("fused", padded=True, split=0))
    parts = [EngineRank(rank, 2).part(vocabulary, torch.arange(100)) for rank in range(2)]
    assert [len(part) for part in parts] == [64, 36] and parts[1][0] == 64
    ((*_, (part,)),) = TensorTable([vocabulary], groups=1).stacks({"fused": torch.zeros(64)}, 1, EngineRank(1, 2))
    assert len(part) == 36


def test_a_tied_output_projection_is_the_embedding() -> None:
    tied = Model(architectures()["Qwen3ForCausalLM"], replace(SIZES, experts=0, tied=True)).tensors
    assert "lm_head.weight" not in tied.rows
    (output,) = tied.in_megatron["output_layer.weight"]
    assert output.name == "model.embed_tokens.weight"


def test_a_scope_of_other_names_or_of_parts_of_a_fused_product_is_refused() -> None:
    spec = QuantSpec.preset("fp8_block_pow2")
    check_scope(spec.override({"scope": ["q_proj", "k_proj", "v_proj", "experts.down_proj"]}))
    with pytest.raises(UserError, match=r"scope: found \['gate'\], expected names out of .*'gate_proj'"):
        check_scope(spec.override({"scope": ["gate"]}))
    with pytest.raises(UserError, match=r"found \['q_proj'\] without the rest of \['q_proj', 'k_proj', 'v_proj'\]"):
        check_scope(spec.override({"scope": ["q_proj"]}))


@pytest.mark.slow
def test_knowing_the_architectures_takes_no_library_of_models() -> None:
    asked = "import sys, fp8rl.models.architecture as a; a.architectures(); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


TENSORS = hf_tensors_served(0)


@pytest.mark.slow
def test_a_base_holds_every_parameter_of_the_engine_and_no_more() -> None:
    """The padding of the vocabulary, which no tensor fills, is the only difference."""
    base, engine = base_of(TENSORS), dict(build(TENSORS).named_parameters())
    assert base.parameters.keys() == engine.keys()
    for name, parameter in engine.items():
        view = base.parameters[name]
        assert (view.shape, view.dtype) == (parameter.shape, parameter.dtype), name
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(view.view(torch.uint8), parameter.view(torch.uint8)), name
    spans = sorted((span.start, span.stop) for span in parameter_spans(DEFINITION, SPEC).values())
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert base.flat.numel() <= 1.01 * sum(tensor.nbytes for tensor in engine.values())


def test_fused_tensors_are_views_and_experts_a_stack() -> None:
    base, rows = base_of(TENSORS), DEFINITION.tensors.rows
    prefix = "model.layers.0.mlp.experts."
    up = base.fused([rows[f"{prefix}1.up_proj.weight"]])
    both = base.fused([rows[f"{prefix}1.{kind}_proj.weight"] for kind in ("gate", "up")], stacked=EXPERTS - 1)
    assert isinstance(up, QuantizedTensor) and isinstance(both, QuantizedTensor)
    assert both.data.shape == (EXPERTS - 1, 2 * WIDTH, HIDDEN)
    assert torch.equal(both.dequantize()[0, WIDTH:], up.dequantize())
    assert up.data.untyped_storage().data_ptr() == base.flat.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="one after the other"):
        base.fused([rows[f"{prefix}1.{kind}_proj.weight"] for kind in ("up", "gate")])


def test_another_spec_is_refused_by_its_size() -> None:
    with pytest.raises(ValueError, match="expected [0-9]+ for this model and spec"):
        SharedBase(base_of(TENSORS).flat, DEFINITION, QuantSpec.preset("bf16"))
