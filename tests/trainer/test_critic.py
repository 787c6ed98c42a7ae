"""The critic on one rank: its values and gradients against transformers, and its state beside the policy's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.numerics.config import NumericsConfig
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.step.batch import ObjectiveOutput
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import reference
from tests.support.trainers import POW2, SIZES, Models, in_fp8, in_order

pytestmark = pytest.mark.slow

CONFIG = TrainerSection(lr=1e-3, warmup_steps=0, micro_batch_tokens=256)
CRITIC = CONFIG.model_copy(update={"lr": 2e-3, "decay": "linear"})
OPTIONS: dict[str, Any] = SIZES | {"total_steps": 9}


def numerics(precision: str = "fp8") -> NumericsConfig:
    return NumericsConfig(spec=POW2, trainer=precision)


@dataclass(frozen=True)
class Squares:
    """Mean squared distance of the values from `fields["returns"]`."""

    targets: int

    def __call__(self, values, entropy, batch) -> ObjectiveOutput:
        errors = torch.where(batch.loss_mask, values - batch.fields["returns"], 0.0)
        return ObjectiveOutput(errors.square().sum() / self.targets)


def batch_with_returns(seed: int = 0):
    batch = random_batch(seed=seed)
    returns = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(seed))
    return batch.with_fields(returns=returns)


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_gradients_are_those_of_plain_autograd(kind: str, models: Models, layout: Layout) -> None:
    from fp8rl.trainer.roles import Critic

    critic = Critic(TrainerSpec(models[kind], CRITIC, numerics("bf16"), **OPTIONS, dtype=torch.float32), layout)
    batch = batch_with_returns()
    assert not critic.score(batch)[1].any(), "a head of zeros"
    head = torch.randn(256, generator=torch.Generator().manual_seed(1)) / 16
    with torch.no_grad():
        critic.model.output_layer.weight.copy_(head[None])
    done = critic.forward_backward(batch, Squares(int(batch.loss_mask.sum())))
    model = reference(models[kind])
    weight = head.clone().requires_grad_()
    hidden = model.model(batch.tokens, attention_mask=batch.real_tokens().long()).last_hidden_state
    values = (hidden @ weight)[:, :-1]
    errors = (values - batch.fields["returns"][:, 1:])[batch.loss_mask[:, 1:]]
    (errors.square().sum() / errors.numel()).backward()
    found = in_order(done.rows, done.result.logprobs)
    assert torch.allclose(found[:, 1:][batch.loss_mask[:, 1:]], values[batch.loss_mask[:, 1:]], atol=1e-4)
    ours = {name: p.main_grad for name, p in critic.model.named_parameters()}
    theirs = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(ours["output_layer.weight"][0], weight.grad, rtol=1e-3, atol=1e-6)
    for megatron_name, hf_name in {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.layers.1.self_attention.linear_proj.weight": "model.layers.1.self_attn.o_proj.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight": "model.layers.0.self_attn.q_norm.weight",
    }.items():
        torch.testing.assert_close(ours[megatron_name], theirs[hf_name], rtol=1e-3, atol=1e-6)


def roles(path: Path, layout: Layout, config: TrainerSection = CONFIG, **options: Any) -> Any:
    from fp8rl.trainer.roles import Roles

    options = OPTIONS | {"reference": True} | options
    return Roles(TrainerSpec(path, config, numerics(), critic=CRITIC, **options), layout)


def trained(held: Any, first: int, last: int) -> list[tuple[float, ...]]:
    out = []
    for step in range(first, last):
        batch = batch_with_returns(seed=step)
        policy = held.models["policy"].train_step(batch, cross_entropy(batch)).result
        critic = held.models["critic"].train_step(batch, Squares(int(batch.loss_mask.sum()))).result
        rates = [held.models[role].optimizer.lr for role in ("policy", "critic")]
        frozen = held.models["reference"].score(batch)[1].double().sum().item()
        out.append((policy.loss, policy.grad_norm, critic.loss, critic.grad_norm, *rates, frozen))
    return out


def test_policy_and_critic_go_on_from_a_checkpoint_bit_for_bit_and_the_reference_is_the_run_s_model(
    moe_path: Path, layout: Layout, tmp_path: Path
) -> None:
    straight = roles(moe_path, layout)
    start = batch_with_returns(seed=3)
    policy, frozen = (straight.models[role].score(start)[1] for role in ("policy", "reference"))
    assert torch.equal(policy, frozen), "the same forward of the same weights"
    expected = trained(straight, 0, 2)
    assert expected[0][2] != expected[1][2] and expected[0][3] > 0, "the critic learns"
    first = roles(moe_path, layout)
    assert trained(first, 0, 1) == expected[:1]
    staged = first.stage(tmp_path / "step_1", {"seed": 7}, {})
    staged.publish([staged.write()])
    resumed = roles(moe_path, layout)
    trained(resumed, 10, 11)  # another past must leave no trace
    assert resumed.load(tmp_path / "step_1") == {"seed": 7} and resumed.policy.weight_version == 1
    assert trained(resumed, 1, 2) == expected[1:]
    for role in ("policy", "critic"):
        ours, theirs = (dict(held.models[role].model.named_parameters()) for held in (resumed, straight))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    held = resumed.models["reference"]
    assert torch.equal(held.score(start)[1], frozen)
    report = resumed.offload()
    assert not any(each.untyped_storage().nbytes() for each in held.model.parameters()), "it sleeps with the trainer"
    assert not list(held.cache.operands()) and report.stays < report.moved
    with pytest.raises(RuntimeError, match="a reference's weights in the host's memory"):
        held.score(start)
    resumed.onload()
    assert torch.equal(held.score(start)[1], frozen)
    # The critic computes in the trainer's numerics.
    critic, policy = (straight.models[role] for role in ("critic", "policy"))
    coarse, _ = critic.score(start)[1], policy.score(start)
    assert in_fp8(critic) == in_fp8(policy) != []
    straight.set_numerics(numerics("bf16"))
    assert not torch.equal(critic.score(start)[1], coarse) and in_fp8(critic) == []


def test_the_critic_s_rate_decays_over_its_own_steps(moe_path: Path, layout: Layout) -> None:
    """The policy waits for the critic in some steps, and then takes fewer."""
    config = CONFIG.model_copy(update={"decay": "linear"})
    held = roles(moe_path, layout, config, reference=False, total_steps=1, critic_steps=3)
    for role, rate in (("policy", CONFIG.lr / 2), ("critic", CRITIC.lr * 3 / 4)):
        held.models[role].optimizer.schedule.step(1)
        assert held.models[role].optimizer.lr == pytest.approx(rate)
