"""The engine's account of its own weights: names, refresh under a version, and every fault seen in the manifest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8rl.models.tensors import WHOLE, EngineRank
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.rollout.engine.plugin import lifecycle
from fp8rl.rollout.engine.plugin import weights as plugin_weights
from fp8rl.rollout.engine.plugin.weights import ServedWeights
from fp8rl.weight_sync.manifest import Manifest
from tests.support import served_model
from tests.support.definitions import listed
from tests.support.served_model import ATTENTION, DEFINITION, DENSE, MOE, SPEC, base_of, build, hf_tensors_served, load

OLD, NEW = hf_tensors_served(0), hf_tensors_served(1)
W13, W2 = "model.layers.0.mlp.experts.w13_weight", f"{MOE}experts.1.down_proj.weight"


@pytest.fixture
def model() -> nn.Module:
    return build(OLD)


@pytest.fixture
def served(model: nn.Module) -> ServedWeights:
    return ServedWeights(SPEC.weight, model, DEFINITION, "0")


def sent(tensors: dict[str, Tensor], version: str) -> Manifest:
    """The trainer's side of a sync."""
    return Manifest.merged(int(version), SPEC, [served_model.recorded(tensors)])


def update(served: ServedWeights, model: nn.Module, tensors: dict[str, Tensor], version: str) -> dict[str, str]:
    served.invalidate()
    load(model, tensors)
    return served.commit(version)


def stock_loader(weights: Iterable[tuple[str, Tensor]]) -> None:
    """The engine's own, which gets no tensor that the table has."""
    pytest.fail(f"found {[name for name, _ in weights]} given to it")


def test_every_hf_tensor_is_found_under_its_name_as_a_view_of_the_engines_own_parameter(model: nn.Module) -> None:
    stacks = list(DEFINITION.tensors.stacks(dict(model.named_parameters()), 128, WHOLE))
    found = {name: view for names, _, stack in stacks for name, view in zip(names, stack, strict=True)}
    assert found.keys() == OLD.keys()
    for names, owner, stack in stacks:
        assert stack.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr(), names
    for name, tensor in OLD.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_model_that_is_not_as_the_table_says_is_refused() -> None:
    changes: dict[str, Callable[[nn.Module], None]] = {
        "model.spare.weight": lambda model: setattr(model.model, "spare", nn.Linear(1, 1)),
        "model.norm.weight": lambda model: delattr(model.model, "norm"),
        "model.norm.saved": lambda model: model.model.norm.register_buffer("saved", torch.ones(1)),
    }
    for named, change in changes.items():
        change(model := build(OLD))
        with pytest.raises(RuntimeError, match=named):
            ServedWeights(SPEC.weight, model, DEFINITION, "0")


def test_a_commit_refreshes_and_a_forward_waits_for_it(served: ServedWeights, model: nn.Module) -> None:
    w13 = model.get_parameter(W13)
    assert torch.equal(served.operand(w13), dequantized_w13(OLD))
    served.invalidate()
    load(model, NEW)
    with pytest.raises(RuntimeError, match=r"version None.*version None.*not committed"):
        served.operand(w13)
    assert not any("@" in entry for entry in served.manifest().values()), "no operand counts before its commit"
    place = served._held[w13].operand.data_ptr()
    assert sent(NEW, "1").differences(served.commit("1")) == {}
    assert torch.equal(served.operand(w13), dequantized_w13(NEW))
    assert served.operand(w13).data_ptr() == place, "new memory takes longer to get than to fill"
    assert not torch.equal(dequantized_w13(OLD), dequantized_w13(NEW))


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with those of experts in stacks."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(re.sub(r"(?<=experts\.)\d+", "0", name), []).append(tensor)
    return {name: torch.stack(some) if "experts" in name else some[0] for name, some in found.items()}


@pytest.mark.parametrize("form", [dict, stacked])
def test_each_tensor_is_copied_to_its_place_and_an_unknown_one_left(served: Any, model: nn.Module, form: Any) -> None:
    held = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    unknown = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(1))
    left = list[tuple[str, Tensor]]()
    served.invalidate()
    served.load(left.extend, [unknown, *form(NEW).items()])
    served.prepare()
    assert left == [unknown] and sent(form(NEW), "1") == sent(NEW, "1")
    assert sent(NEW, "1").differences(served.commit("1")) == {}
    assert held == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}, "written in place"


def test_a_tensor_of_another_dtype_is_cast_and_one_of_another_shape_is_refused(
    served: ServedWeights, model: nn.Module
) -> None:
    """A copy would repeat a short tensor to fill its place."""
    name = "model.norm.weight"
    served.invalidate()
    served.load(stock_loader, [(name, NEW[name].float())])
    assert model.get_parameter(name).equal(NEW[name])
    with pytest.raises(RuntimeError, match=rf"found {name} of shape \(1,\), expected \(256,\)"):
        served.load(stock_loader, [(name, NEW[name][:1])])
    first = f"{MOE}experts.0.down_proj.weight"
    with pytest.raises(RuntimeError, match=rf"found {first} of shape \(128, 128\), expected \(256, 128\)"):
        served.load(stock_loader, [(first, stacked(NEW)[first][:, :128])])


def test_operands_are_prepared_while_the_rest_is_on_its_way(
    served: ServedWeights, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    digested: list[int] = []
    operand = plugin_weights.ops.weight_operand
    monkeypatch.setattr(plugin_weights.ops, "weight_operand", lambda *given: made.append(1) or operand(*given))
    w13, names = model.get_parameter(W13), list(NEW)
    served.invalidate()
    for bucket in (names[:7], names[7:], names[:8]):  # a matrix apart from its scales, and some of it once more
        served.load(stock_loader, [(name, NEW[name]) for name in bucket])
        served.prepare()
        with pytest.raises(RuntimeError, match="not committed"):
            served.operand(w13)
    before, digests = len(made), plugin_weights.stack_digests
    monkeypatch.setattr(plugin_weights, "stack_digests", lambda views: digested.append(len(views)) or digests(views))
    assert sent(NEW, "1").differences(served.commit("1")) == {}
    assert len(made) == before and digested == [0], "all were prepared"
    assert torch.equal(served.operand(w13), dequantized_w13(NEW))
    served.invalidate()
    served.load(stock_loader, OLD.items())
    served.prepare()
    served.load(stock_loader, [(name, NEW[name]) for name in names if "experts.1" in name])  # after it was prepared
    mixed = OLD | {name: NEW[name] for name in names if "experts.1" in name}
    assert sent(mixed, "2").differences(served.commit("2")) == {}
    assert torch.equal(served.operand(w13), dequantized_w13(mixed))


def test_a_parameter_whose_memory_was_replaced_is_digested_where_it_is_now(
    served: ServedWeights, model: nn.Module
) -> None:
    """Also if it was digested before, while the rest was on its way."""
    norm = model.get_parameter(name := "model.norm.weight")
    served.invalidate()
    served.load(stock_loader, NEW.items())
    served.prepare()
    norm.data = OLD[name].clone()
    (difference,) = sent(NEW, "1").differences(served.commit("1")).values()
    assert difference.startswith(f"{name}: ")
    served.invalidate()
    served.load(stock_loader, NEW.items())
    assert norm.equal(NEW[name]) and sent(NEW, "2").differences(served.commit("2")) == {}


def test_the_manifest_is_taken_from_the_parameters_anew(served: ServedWeights, model: nn.Module) -> None:
    assert update(served, model, NEW, "1") == served.manifest()
    quantized = {name for name in NEW if name + "_scale_inv" in NEW}
    assert len(sent(NEW, "2").differences(served.manifest())) == len(quantized), "another version is another operand"
    model.get_parameter("model.layers.0.input_layernorm.weight").data[3] += 1
    (difference,) = sent(NEW, "1").differences(served.manifest()).values()
    assert difference.startswith("model.layers.0.input_layernorm.weight: ")


@pytest.mark.parametrize(
    ("stale", "names"),
    [
        (W13, [f"{MOE}experts.{e}.{kind}_proj.weight" for e in range(3) for kind in ("gate", "up")]),
        (ATTENTION + "qkv_proj.weight", [f"{ATTENTION}{kind}_proj.weight" for kind in "kqv"]),
        (DENSE + "down_proj.weight", [DENSE + "down_proj.weight"]),
    ],
)
def test_a_stale_cache_is_caught(
    served: ServedWeights, model: nn.Module, monkeypatch: pytest.MonkeyPatch, stale: str, names: list[str]
) -> None:
    """One parameter's dequantized values are not made anew, while its codes are the new ones."""
    original = plugin_weights.quantized_parameters
    left_out = model.get_parameter(stale)

    def forgetful(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return ((p, scale) for p, scale in original(model) if p is not left_out)

    monkeypatch.setattr(plugin_weights, "quantized_parameters", forgetful)
    found = update(served, model, NEW, "1")
    expected = sent(NEW, "1")
    assert list(expected.differences(found).values()) == [
        f"{name}: found {expected.entries[name].removesuffix('@1')}, expected {expected.entries[name]}"
        for name in names
    ]
    with pytest.raises(RuntimeError, match=r"operand of version None .* expected version 1"):
        served.operand(left_out)


def flipped_bit(model: nn.Module) -> None:
    model.get_parameter(ATTENTION + "qkv_proj.weight").data.view(torch.uint8)[600, 3] ^= 0x80


def swapped_scales(model: nn.Module) -> None:
    scales = model.get_parameter(DENSE + "gate_up_proj.weight_scale_inv").data
    assert scales[0, 0] != scales[1, 0]
    scales[:2, 0] = scales[:2, 0].flip(0)


def missed_expert(model: nn.Module) -> None:
    old = build(OLD)
    for name in ("w2_weight", "w2_weight_scale_inv"):
        path = f"{MOE}experts.{name}"
        model.get_parameter(path).data[1] = old.get_parameter(path).data[1]


def rounded_norm(model: nn.Module) -> None:
    model.get_parameter(ATTENTION + "q_norm.weight").data.view(torch.int16)[5] ^= 1


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (flipped_bit, {ATTENTION + "k_proj.weight"}),  # row 600 is behind the 512 rows of q
        (swapped_scales, {DENSE + "gate_proj.weight_scale_inv"}),
        (missed_expert, {f"{MOE}experts.1.down_proj.weight", f"{MOE}experts.1.down_proj.weight_scale_inv"}),
        (rounded_norm, {ATTENTION + "q_norm.weight"}),
    ],
)
def test_a_fault_is_named(
    served: ServedWeights, model: nn.Module, fault: Callable[[nn.Module], None], names: set[str]
) -> None:
    served.invalidate()
    load(model, NEW)
    fault(model)
    assert sent(NEW, "1").differences(served.commit("1")).keys() == names


def dequantized_w13(tensors: dict[str, Tensor]) -> Tensor:
    """[experts, 2F, H]: each block of 128 x 128 codes times its scale, spelt out."""
    names = [f"{MOE}experts.{expert}.{kind}_proj.weight" for expert in range(3) for kind in ("gate", "up")]
    codes, scales = (torch.stack([tensors[name + end].float() for name in names]) for end in ("", "_scale_inv"))
    values = codes * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return values.unflatten(0, (3, 2)).flatten(1, 2).bfloat16()


def test_an_engine_that_maps_a_base_holds_its_tensors_and_has_no_copy(served: ServedWeights, model: nn.Module) -> None:
    base, multiplied = base_of(NEW), model.get_parameter(W13)
    served.map_base(base)
    with pytest.raises(RuntimeError, match="without a version"):
        served.check()
    assert not sent(NEW, "3").differences(served.commit("3"))
    places = {view.data_ptr() for view in base.parameters.values()}
    assert all(each.data_ptr() in places for each in model.parameters())
    assert list(served.everything()) == []
    of_codes = QuantizedTensor(multiplied, model.get_parameter(W13 + "_scale_inv"), SPEC.weight)
    assert torch.equal(served.operand(multiplied).dequantized(), of_codes.dequantize())
    with pytest.raises(RuntimeError, match=f"found {W2} sent to an engine that reads it from a base"):
        served.load(stock_loader, [(W2, NEW[W2])])
    served.release()  # the memory of others stays
    served.occupy()
    assert not sent(NEW, "4").differences(served.commit("4"))


def test_cuda_graphs_are_captured_again_once_the_weights_of_a_base_are_committed(
    served: ServedWeights, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture runs the model, which asks for every operand; and none runs while the engine's memory is released."""
    captured: list[str | None] = []
    quantized = [each for each in model.parameters() if each.dtype == torch.float8_e4m3fn]

    def capture() -> None:
        assert quantized and all(served.operand(each) is not None for each in quantized)
        captured.append(served.version)

    released: dict[str, list[Any]] = {}
    monkeypatch.setattr(lifecycle, "state", lambda: SimpleNamespace(weights=served, released=released))
    monkeypatch.setattr(ServedWeights, "device", torch.device("cuda"))
    served.map_base(base_of(NEW))
    steps = (({}, False, []), ({"kv_cache": []}, True, []), ({}, False, ["3"]), ({}, False, ["3"]))
    for kept, commits, expected in steps:
        released.clear()
        released.update(kept)
        if commits:
            served.commit("3")
        lifecycle.capture_again(SimpleNamespace(init_decode_cuda_graph=capture))
        assert captured == expected


def test_a_base_that_changes_under_the_engine_is_found_when_somebody_asks(served: ServedWeights) -> None:
    base = base_of(NEW)
    served.map_base(base)
    proven = served.commit("3")
    assert served.manifest() == proven
    base.tensors[f"{MOE}experts.1.up_proj.weight"].view(torch.uint8)[0, 0] ^= 1
    assert sent(NEW, "3").differences(served.manifest()).keys() == {f"{MOE}experts.1.up_proj.weight"}


def test_a_rank_takes_its_part_of_what_is_sent_and_leaves_the_other_ranks_experts() -> None:
    rank, product, stack = EngineRank(1, 2), f"{ATTENTION}o_proj.weight", f"{MOE}experts.w2_weight"
    names = [product, *(f"{MOE}experts.{expert}.down_proj.weight" for expert in range(2))]
    rows = [DEFINITION.tensors[name] for name in names]
    definition = listed("Shared", served_model.SIZES, lambda _: iter(rows))
    own = {name: tensor for name, tensor in NEW.items() if name.removesuffix("_scale_inv") in names}
    model = nn.Module()
    for suffix in ("", "_scale_inv"):
        half, expert = own[product + suffix].chunk(2, 1)[1], own[names[2] + suffix]
        for name, value in ((product, half), (stack, expert[None])):
            path, _, last = (name + suffix).rpartition(".")
            zeros = nn.Parameter(torch.zeros_like(value), requires_grad=False)
            served_model.module_at(model, path).register_parameter(last, zeros)
    served = ServedWeights(SPEC.weight, model, definition, "0", rank)
    served.invalidate()
    served.load(stock_loader, stacked(own).items())
    held = served.commit("1")
    sent_to_all = Manifest.merged(1, SPEC, [served_model.recorded(stacked(own), definition, ranks=2)]).entries
    expected = [f"{product}{suffix}#1/2" for suffix in ("", "_scale_inv")] + [names[2], f"{names[2]}_scale_inv"]
    assert held == {label: sent_to_all[label] for label in expected}
