"""Adapters on one rank: what they compute, what they train, and what they leave alone."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.models import read_shape
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.checkpoint.peft import base_digest
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.memory import DeviceMemory
from fp8rl.numerics.digest import tensor_digest
from fp8rl.numerics.ops.linear import ROW_BLOCK
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.inventory import inventory
from fp8rl.trainer.modules.weights import named_weights
from fp8rl.trainer.roles import WithoutAdapter
from fp8rl.trainer.state_bytes import state_bytes
from fp8rl.weight_sync.frozen import place_base
from tests.support.batches import cross_entropy, random_batch
from tests.support.cuda_ipc import install_cuda_ipc
from tests.support.launches import Made
from tests.support.models import write_model
from tests.support.trainers import MakeTrainer, Models, save_checkpoint, spread, train

pytestmark = pytest.mark.slow


@pytest.fixture(params=["moe", "latent", "linear"])
def path(request: pytest.FixtureRequest, models: Models) -> Path:
    return models[request.param]


@pytest.mark.parametrize("experts", ["per_expert", "shared"])
def test_a_merged_adapter_is_fully_trained(experts: str, path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """The model that is served, trained whole: its weight gradients, contracted, are those of A and B."""
    batch = random_batch(seed=0)
    merged = make_trainer(path, "bf16", adapter=AdapterSection(rank=8, mode="merged", experts=experts))
    spread(merged)
    merged.export_hf(tmp_path / "merged")
    whole = make_trainer(tmp_path / "merged", "bf16")
    ours = merged.forward_backward(batch, cross_entropy(batch)).result
    theirs = whole.forward_backward(batch, cross_entropy(batch)).result
    assert torch.equal(ours.logprobs, theirs.logprobs)
    gradients = {name: p.main_grad.float() for name, p in whole.model.named_parameters()}
    for name, module in merged.model.named_modules():
        if (adapter := getattr(module, "adapter", None)) is None:
            continue
        dw, low_rank = gradients[f"{name}.weight"], adapter.low_rank
        a, b = (each.detach().float().requires_grad_() for each in (low_rank.a, low_rank.b))
        (torch.matmul(b, a) * dw).sum().mul(low_rank.scale).backward()
        assert relative(adapter.a.main_grad, a.grad) < 0.01, name
        assert relative(adapter.b.main_grad, own_rows(b.grad, adapter)) < 0.01, name


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def own_rows(wide: Tensor, adapter) -> Tensor:
    """Of the gradient of a wide B [..., N, parts * rank], what each row of B has."""
    if adapter.fused is None:
        return wide
    return wide.flatten(-2)[..., adapter.fused.index].unflatten(-1, (-1, adapter.config.rank))


@pytest.mark.parametrize("mode", ["merged", "separate"])
def test_adapters_of_linear_attention_are_float64s(mode: str, models: Models, make_trainer: MakeTrainer) -> None:
    """Values and gradients of a product of a few columns in BF16, of two matrices, with fewer rows than the rank."""
    trainer = make_trainer(models["linear"], "fp8", adapter=AdapterSection(rank=8, mode=mode))
    spread(trainer, 0.2)
    product = trainer.model.decoder.layers[0].self_attention.gate_proj
    adapter, (n, k) = product.adapter, product.weight.shape
    assert (adapter.parts, n) == (2, 8) and trainer.definition.tensors["model.layers.0.linear_attn.in_proj_a.weight"]
    draw = torch.Generator().manual_seed(3)
    x, given = torch.randn(50, 1, k, generator=draw).bfloat16(), torch.randn(50, 1, n, generator=draw).bfloat16()
    out = product(x.requires_grad_())
    (out.float() * given.float()).sum().backward()
    low_rank = adapter.low_rank
    a, b, wide = (each.detach().double().requires_grad_() for each in (low_rank.a, low_rank.b, x))
    expected = wide @ product.weight.detach().double().T + low_rank.scale * (wide @ a.T) @ b.T
    (expected * given.double()).sum().backward()
    assert relative(out, expected) < 0.01
    plain = wide @ product.weight.detach().double().T
    assert relative(plain, expected) > 0.1  # the adapter counts
    for found, exact in ((x.grad, wide.grad), (adapter.a.main_grad, a.grad)):
        assert relative(found, exact) < 0.01
    assert relative(adapter.b.main_grad, own_rows(b.grad, adapter)) < 0.01


@pytest.mark.parametrize("mode", ["merged", "separate"])
def test_at_first_an_adapter_changes_nothing(mode: str, moe_path: Path, make_trainer: MakeTrainer) -> None:
    batch = random_batch(seed=0)
    plain, adapted = make_trainer(moe_path, "fp8"), make_trainer(moe_path, "fp8", adapter=AdapterSection(mode=mode))
    assert torch.equal(plain.score(batch)[1], adapted.score(batch)[1])
    before = {name: p.clone() for name, p in adapted.model.named_parameters()}
    adapted.train_step(batch, cross_entropy(batch))
    changed = {name for name, p in adapted.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.endswith("lora_b")}  # with B = 0 no A has a gradient
    trained = ("gradients", "masters", "moments")
    held = [each for each in inventory(adapted.optimizer, adapted.cache) if each.kind in trained]
    assert held and all("lora_" in each.name for each in held)


@pytest.mark.parametrize("mode", ["merged", "separate", "full"])
def test_no_gradient_of_a_weight_is_computed(mode: str, moe_path: Path, make_trainer: MakeTrainer) -> None:
    """Nothing that a pass makes has the shape of a weight, unless weights are trained.

    No weight has as few rows as a micro-batch, in the whole blocks of 64 that AMX multiplies, too.
    """
    config = None if mode == "full" else AdapterSection(rank=24, mode=mode)
    trainer = make_trainer(moe_path, "fp8", adapter=config, micro_batch_tokens=3 * ROW_BLOCK)
    batch = random_batch(seed=0)
    rows = trainer.weights.rows(trainer.model)
    of_layers = (each for name, each in named_weights(trainer.model) if rows[name][0].kind)
    shapes = {tuple(each.shape[-2:]) for each in of_layers}
    assert min(shapes)[0] > 3 * ROW_BLOCK
    trainer.score(batch)  # after which operands are there
    with Made() as made:
        trainer.forward_backward(batch, cross_entropy(batch))
    found = {shape[-2:] for shape in made.shapes}
    assert (72, 256) in found or mode == "full", "the gradient of the As of queries, keys and values is seen"
    assert bool(found & shapes) == (mode == "full")


def test_targets_may_be_a_part_of_what_is_fused(moe_path: Path, make_trainer: MakeTrainer) -> None:
    """As `q_proj` and `v_proj` alone: keys stay the base's, also in what is written."""
    config = AdapterSection(rank=4, mode="merged", targets=("q_proj", "v_proj", "up_proj"))
    trainer = make_trainer(moe_path, adapter=config)
    spread(trainer)
    base, served = (dict(each) for each in (trainer.weights.base(trainer.model), trainer.weights.share(trainer.model)))
    changed = {name.split(".")[-2] for name in base if not torch.equal(base[name], served[name])}
    assert changed == {"q_proj", "v_proj", "up_proj"}
    adapters = dict(trainer.weights.adapters(trainer.model))
    for name in (name for name in base if name.split(".")[-2] in changed):
        a, b = (adapters[f"{name.removesuffix('.weight')}.lora_{letter}.weight"].float() for letter in "AB")
        assert torch.equal(served[name], (base[name].float() + config.scale * (b @ a)).bfloat16()), name


def test_adapters_resume_from_their_checkpoint(moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    config = AdapterSection(rank=4, mode="merged", targets=("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"))
    straight, first, resumed, whole = (make_trainer(moe_path, "fp8", adapter=each) for each in (*[config] * 3, None))
    expected = train(straight, 0, 4)
    assert train(first, 0, 2) == expected[:2]
    save_checkpoint(first, tmp_path / "adapters", {"seed": 7})
    train(resumed, 10, 11)  # a different past must leave no trace
    assert resumed.load(tmp_path / "adapters") == {"seed": 7} and train(resumed, 2, 4) == expected[2:]
    save_checkpoint(whole, tmp_path / "whole", {})
    small, large = (sum(f.stat().st_size for f in (tmp_path / name).rglob("*")) for name in ("adapters", "whole"))
    assert small < large / 8
    other = make_trainer(moe_path, "fp8", adapter=config.model_copy(update={"alpha": 8.0}))
    elsewhere = make_trainer(write_model(tmp_path / "other", kv_heads=4), adapter=config)
    for trainer, name, said in (
        (resumed, "whole", "found 'all weights, trained whole', expected adapters"),
        (whole, "adapters", "found 'adapters', expected all weights, trained whole"),
        (other, "adapters", r"adapter\.alpha: found 32\.0, expected 8\.0"),
        (elsewhere, "adapters", "digest of the base"),
    ):
        with pytest.raises(UserError, match=said):
            trainer.load(tmp_path / name)


@pytest.mark.parametrize(
    ("kind", "precision", "gpu"), [("moe", "fp8", 0), ("moe", "bf16", 0), ("dense", "fp8", 0), ("latent", "fp8", 1)]
)
def test_weights_that_engines_read_too_are_trained_beside_and_resumed_as_before(
    kind: str, precision: str, gpu: int, models: Models, tmp_path: Path, make_trainer: Any, monkeypatch: Any
) -> None:
    """Each way between two trainers of which one has its frozen weights in a base, and never had them elsewhere."""
    if gpu:
        install_cuda_ipc(monkeypatch)
        monkeypatch.setattr("fp8rl.weight_sync.frozen.share", lambda name, size, device: DeviceMemory(size, device))
    path, config = models[kind], AdapterSection(rank=4)
    spec = QuantSpec.preset("bf16" if precision == "bf16" else "fp8_block_pow2")
    apart, shared = (make_trainer(path, precision, adapter=config, shared_base=shared) for shared in (False, True))
    frozen = [p for p in shared.model.parameters() if not p.requires_grad]
    assert len({p.untyped_storage().data_ptr() for p in frozen}) == 1 and all(p.isnan().all() for p in frozen)
    assert frozen[0].untyped_storage().nbytes() == max(p.nbytes for p in frozen)
    sent = place_base(shared, spec)
    placed = shared.placed
    digests = map(tensor_digest, placed.base.tensors.values())
    assert pickle.loads(pickle.dumps(sent)).digests == dict(zip(placed.base.tensors, digests)), "what a rank answers"
    assert placed.unquantized == base_digest(path, shared.definition)
    planned = state_bytes(read_shape(path, adapter=config), shared.config, shared.numerics, "torch", base=True)
    adapters = 2 * sum(p.numel() for p in shared.model.parameters() if p.requires_grad)
    assert placed.kept + adapters == sum(each.parameters for each in planned.values())
    assert kind != "moe" or (placed.kept > 0) == (precision == "bf16"), "q, k and v are there in another order"
    assert train(shared, 0, 2) == train(apart, 0, 2)
    assert not list(shared.cache.operands()), "products read codes where engines read them"
    save_checkpoint(shared, tmp_path / "shared", {})
    save_checkpoint(apart, tmp_path / "apart", {})
    apart.load(tmp_path / "shared")
    shared.load(tmp_path / "apart")
    assert train(shared, 2, 3) == train(apart, 2, 3)


def test_without_its_adapter_a_policy_is_its_base_and_bf16_is_bf16(path: Path, make_trainer: MakeTrainer) -> None:
    batch = random_batch(seed=0)
    before = make_trainer(path, "fp8").score(batch)[1]
    for mode in ("merged", "separate"):
        policy, plain = (make_trainer(path, each, adapter=AdapterSection(mode=mode)) for each in ("fp8", "bf16"))
        for each in (policy, plain):
            spread(each)
        learned = policy.score(batch)[1]
        assert torch.equal(WithoutAdapter(policy).score_routed(batch)[1].logprobs, before)
        assert torch.equal(policy.score(batch)[1], learned) and not torch.equal(learned, before)
        policy.set_numerics(plain.numerics)
        assert torch.equal(policy.score(batch)[1], plain.score(batch)[1])


def test_a_merged_update_survives_if_larger_than_the_grids_steps(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path, "fp8", adapter=AdapterSection(rank=4, mode="merged", experts="shared"))
    assert trainer.update_survival() is None
    found = []
    for size in (1.0, 0.01, 1e-4):
        spread(trainer, size)
        found.append(trainer.update_survival())
    assert 1.0 > found[0] > 0.99 > found[1] > found[2] + 0.2 > 0.2
    assert make_trainer(moe_path, "bf16", adapter=AdapterSection(mode="merged")).update_survival() is None
