"""Adapters beside the engine's fused parameters: what products take, and what a sync of them alone proves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics import ops
from fp8rl.numerics.ops import LowRank
from fp8rl.rollout.engine.plugin.parameters import AdaptedRows
from fp8rl.rollout.engine.plugin.weights import ServedWeights
from fp8rl.rollout.engine.protocol import ADAPTER_SCALE
from fp8rl.weight_sync.frozen import FrozenBase
from fp8rl.weight_sync.manifest import Manifest
from tests.support import served_model
from tests.support.served_model import ATTENTION, DEFINITION, DENSE, MOE, SPEC, build, hf_tensors_served, recorded

CONFIG = AdapterSection(rank=4, alpha=8.0)
SHARED = AdapterSection(rank=4, alpha=8.0, experts="shared", targets=("q_proj", "v_proj", "up_proj", "down_proj"))
BASE = hf_tensors_served(0)
QKV, W13, W2 = f"{ATTENTION}qkv_proj.weight", f"{MOE}experts.w13_weight", f"{MOE}experts.w2_weight"


def adapters(config: AdapterSection, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = (row for row in DEFINITION.adapted(config).tensors.rows.values() if row.adapts is not None)
    return {row.name: torch.randn(row.shape, generator=generator).bfloat16() for row in rows}


def attached(config: AdapterSection) -> ServedWeights:
    return ServedWeights(SPEC.weight, build(BASE), DEFINITION.adapted(config), "0")


def nothing(weights: object) -> None:
    raise AssertionError("SGLang's own loader was given what it does not know")


def update(weights: ServedWeights, tensors: dict[str, Tensor], version: str) -> dict[str, str]:
    weights.invalidate()
    weights.load(nothing, tensors.items())
    return weights.commit(version)


def expected(config: AdapterSection, tensors: dict[str, Tensor], version: int) -> Manifest:
    """The trainer's side of a sync of adapters alone, which are these."""
    base, model = FrozenBase(), DEFINITION.adapted(config)
    base.completed([recorded(BASE | adapters(config, seed=9), model)], config, "weights and adapters")
    return Manifest.merged(version, SPEC, base.completed([recorded(tensors, model)], config, "adapters"))


def low_rank(weights: ServedWeights, name: str) -> LowRank:
    found = weights.low_rank(dict(weights._model.named_parameters())[name])
    assert found is not None
    return found


@pytest.mark.parametrize("config", (CONFIG, SHARED), ids=("all, of each expert", "some, of all experts"))
def test_a_fused_product_adds_the_terms_of_its_matrices(config: AdapterSection) -> None:
    weights, sent = attached(config), adapters(config)
    entries = update(weights, sent, "1")
    assert not expected(config, sent, 1).differences(entries)
    x = torch.randn(20, served_model.HIDDEN).bfloat16()

    def alone(name: str, width: int) -> Tensor:
        """The term of one matrix; zeros if it has no adapter."""
        if f"{name}.lora_A.weight" not in sent:
            return torch.zeros(len(x), width).bfloat16()
        return ops.low_rank_of(x, LowRank(sent[f"{name}.lora_A.weight"], sent[f"{name}.lora_B.weight"], 2.0))

    heads = {"q": served_model.HEADS, "k": served_model.KEY_HEADS, "v": served_model.KEY_HEADS}
    widths = {kind: count * served_model.HEAD_DIM for kind, count in heads.items()}
    qkv = torch.cat([alone(f"{ATTENTION}{kind}_proj", width) for kind, width in widths.items()], 1)
    assert torch.equal(ops.low_rank_of(x, low_rank(weights, QKV)), qkv)
    gate_up = torch.cat([alone(f"{DENSE}{kind}_proj", 2 * served_model.WIDTH) for kind in ("gate", "up")], 1)
    assert torch.equal(ops.low_rank_of(x, low_rank(weights, f"{DENSE}gate_up_proj.weight")), gate_up)
    experts = low_rank(weights, W13)
    for expert in range(served_model.EXPERTS if experts.per_expert else 1):
        place = f"{expert}." if experts.per_expert else ""
        own = LowRank(experts.a[expert], experts.b[expert], 2.0, experts.parts) if experts.per_expert else experts
        whole = torch.cat([alone(f"{MOE}experts.{place}{kind}_proj", served_model.WIDTH) for kind in ("gate", "up")], 1)
        assert torch.equal(ops.low_rank_of(x, own), whole)


def test_a_sync_of_adapters_alone_leaves_the_operands_and_digests_the_base_anew() -> None:
    weights = attached(CONFIG)
    parameter = dict(weights._model.named_parameters())[QKV]
    operand, address = weights.operand(parameter), low_rank(weights, QKV).b.data_ptr()
    first = update(weights, adapters(CONFIG, 1), "1")
    second = update(weights, adapters(CONFIG, 2), "2")
    assert weights.operand(parameter) is operand and low_rank(weights, QKV).b.data_ptr() == address
    assert not expected(CONFIG, adapters(CONFIG, 1), 1).differences(first)
    assert not expected(CONFIG, adapters(CONFIG, 2), 2).differences(second)


def test_rows_of_requests_for_the_base_go_without_the_adapters() -> None:
    """In prefills of some tokens each, and in a decode step."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rows = AdaptedRows(12, torch.device("cpu"))
    weights = ServedWeights(SPEC.weight, build(BASE), DEFINITION.adapted(CONFIG), "0", adapted_rows=rows)
    update(weights, adapters(CONFIG), "1")

    def batch(mode: ForwardMode, lengths: list[int]) -> SimpleNamespace:
        tokens, names = torch.zeros(sum(lengths)), [None, "base", None]
        new = None if mode.is_decode() else torch.tensor(lengths)
        return SimpleNamespace(lora_ids=names, forward_mode=mode, input_ids=tokens, extend_seq_lens=new)

    x = torch.randn(9, served_model.HIDDEN).bfloat16()
    for mode, lengths in ((ForwardMode.EXTEND, [2, 4, 3]), (ForwardMode.EXTEND, [1, 3, 2])):
        rows.take(batch(mode, lengths))
        assert rows.mask[: sum(lengths)].tolist() == [True] * lengths[0] + [False] * lengths[1] + [True] * lengths[2]
    rows.take(batch(ForwardMode.DECODE, [1, 1, 1]))
    assert rows.mask[:3].tolist() == [True, False, True]
    found, place = ops.low_rank_of(x[:3], low_rank(weights, QKV)), rows.mask.data_ptr()
    assert (found[1] == 0).all() and found[1].signbit().all() and (found[[0, 2]] != 0).any(1).all()
    assert low_rank(weights, W13).of_rows(torch.tensor([1, 1, 0])).rows is not None and place == rows.mask.data_ptr()


def not_sent(weights: ServedWeights, tensors: dict[str, Tensor]) -> None:
    del tensors[f"{ATTENTION}k_proj.lora_B.weight"]


def other_experts(weights: ServedWeights, tensors: dict[str, Tensor]) -> None:
    one, two = f"{MOE}experts.0.up_proj.lora_A.weight", f"{MOE}experts.2.up_proj.lora_A.weight"
    tensors[one], tensors[two] = tensors[two], tensors[one]


def wrong_scale(weights: ServedWeights, tensors: dict[str, Tensor]) -> None:
    for adapter in weights._adapters.values():
        object.__setattr__(adapter.low_rank, "scale", 1.0)


def changed_base(weights: ServedWeights, tensors: dict[str, Tensor]) -> None:
    codes = dict(weights._model.named_parameters())[W2].data.view(torch.uint8)
    codes[1, 5, 7] ^= 1


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (not_sent, [f"{ATTENTION}k_proj.lora_B.weight"]),
        (other_experts, [f"{MOE}experts.{expert}.up_proj.lora_A.weight" for expert in (0, 2)]),
        (wrong_scale, [ADAPTER_SCALE]),
        (changed_base, [f"{MOE}experts.1.down_proj.weight"]),
    ],
)
def test_a_fault_is_named(fault: Callable[..., None], named: list[str]) -> None:
    weights, sent = attached(CONFIG), adapters(CONFIG)
    arriving = dict(sent)
    fault(weights, arriving)
    assert sorted(expected(CONFIG, sent, 1).differences(update(weights, arriving, "1"))) == sorted(named)
