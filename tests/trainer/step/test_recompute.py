"""What takes less memory, parts computed once more and a head in chunks of tokens, changes no bit that it need not."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.backend import dispatch
from fp8rl.numerics.sampling import Truncation
from fp8rl.trainer.step.batch import LIKELY_IDS, OWN_LIKELY, ObjectiveOutput, TokenBatch
from fp8rl.trainer.step.kept_tokens import KeptTokenPool
from tests.support.batches import Entropy, cross_entropy, random_batch, random_routes
from tests.support.models import VOCAB, write_model
from tests.support.trainers import MakeTrainer, Models, critic_on, gradients, scored, spread

pytestmark = pytest.mark.slow

PARTS = ["attention", "layer", "experts"]
MLPS = AdapterSection(rank=8, targets=("gate_proj", "up_proj", "down_proj"))
LATENTS = AdapterSection(rank=8, targets=("kv_b_proj",))


def likeliest(logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
    """The log-probabilities of two ids for each token, of which the first one is its own."""
    own = batch.fields[OWN_LIKELY]
    assert own.shape == batch.fields[LIKELY_IDS].shape and own[..., 0][batch.loss_mask].equal(logprobs[batch.loss_mask])
    return ObjectiveOutput((own * torch.tensor([0.3, -0.7]))[batch.loss_mask].sum() / 100)


def routed(replay: bool) -> TokenBatch:
    batch = random_batch(temperature=0.9)
    return replace(batch, routes=random_routes(batch), replay=replay, seeds=torch.arange(batch.rows))


def passed(trainer: Any, batch: TokenBatch) -> tuple[Any, dict[str, Tensor], dict[str, int]]:
    """The result of a pass, its gradients, and how often a layer and its parts were computed."""
    calls: dict[str, int] = {}

    def count(name: str):
        calls[name] = 0
        return lambda *_: calls.update({name: calls[name] + 1})

    layer = trainer.model.decoder.layers[0]
    counts = {name: count(name) for name in ("attention", "experts", "layer")}
    places = {"attention": "attention", "delta": "attention", "experts": "experts", "gate_up": "experts"}
    with ExitStack() as stack:
        stack.callback(layer.register_forward_hook(counts["layer"]).remove)
        if hasattr(layer, "blocks"):

            def watch(op: str, *_: Any) -> None:
                kept = op in ("quantize", "weight_operand", "trained_operand")
                site = None if kept else dispatch.place
                if site is not None and site.layer == 0 and site.op.name in places:
                    counts[places[site.op.name]]()

            stack.enter_context(dispatch.watched(watch))
        else:
            modules = {"attention": "self_attention.core_attention"}
            modules["experts"] = "mlp.experts" if hasattr(layer.mlp, "experts") else "mlp"
            for name, path in modules.items():
                stack.callback(layer.get_submodule(path).register_forward_hook(counts[name]).remove)
        result = trainer.forward_backward(batch, cross_entropy(batch)).result
    return result, gradients(trainer), calls


@pytest.mark.parametrize(
    ("kind", "mode", "adapter"),
    [*((kind, mode, None) for kind in ("moe", "dense") for mode in ("exact", "native")), ("linear", "exact", None),
     ("latent", "exact", None), ("latent", "exact", LATENTS), ("moe", "exact", MLPS)],
)  # fmt: skip
def test_recomputing_keeps_bits(kind: str, mode: str, adapter: Any, make_trainer: MakeTrainer, models: Models) -> None:
    """Adapters of the first layer have a gradient too, where nothing before them is trained."""
    batches = [routed(replay=False), routed(replay=True)] if kind == "moe" else [random_batch()]
    if kind == "linear":  # which goes token by token
        batches = [random_batch(rows=3, longest=30)]

    def made(**keys: str) -> Any:
        trainer = make_trainer(models[kind], "fp8", mode=mode, adapter=adapter, **keys)
        spread(trainer)
        return trainer

    plain = made()
    expected = [passed(plain, batch) for batch in batches]
    for part in PARTS[:2] if kind == "linear" else PARTS:  # its experts are those of other models
        trainer = made(recompute=part)
        for batch, (wanted, sums, once) in zip(batches, expected, strict=True):
            found, again, calls = passed(trainer, batch)
            twice = {name: 2 * once[name] if part in (name, "layer") else once[name] for name in once}
            assert calls == twice, part
            assert torch.equal(found.logprobs, wanted.logprobs) and found.loss == wanted.loss
            for name in ("routes", "draws"):
                values = getattr(found, name), getattr(wanted, name)
                assert (values[0] is None) == (values[1] is None) == (kind != "moe")
                assert values[0] is None or torch.equal(*values), (part, name)
            assert all(torch.equal(again[name], sums[name]) for name in sums), part
            assert len(sums) >= 4 and all(each.any() for each in sums.values())


CHUNK = 37
"""No divisor of anything."""
WORDS = 320
"""A vocabulary by which its tensors are known: no other size of the model."""


@pytest.fixture(scope="module")
def batch() -> TokenBatch:
    return replace(random_batch(temperature=0.9), seeds=torch.arange(12))


@pytest.mark.parametrize(("kind", "mode"), [("moe", "exact"), ("dense", "native")])
def test_chunks_change_the_gradient_of_the_head_s_weight_alone_and_by_the_order_of_its_sum(
    kind: str, mode: str, make_trainer: MakeTrainer, batch: TokenBatch, models: Models
) -> None:
    whole, chunked = (make_trainer(models[kind], "fp8", mode=mode, head_chunk_tokens=each) for each in (4096, CHUNK))
    ids = torch.stack([batch.tokens, (batch.tokens + 5) % VOCAB], -1).float()
    batch = batch.with_fields(**{LIKELY_IDS: ids})
    for objective in (cross_entropy(batch), Entropy(100), likeliest):
        expected, found = (each.forward_backward(batch, objective).result for each in (whole, chunked))
        assert torch.equal(found.logprobs, expected.logprobs) and torch.equal(found.draws, expected.draws)
        assert found.loss == expected.loss and found.metrics == expected.metrics and (expected.draws >= 0).sum() > 100
        wanted, got = gradients(whole), gradients(chunked)
        assert wanted["decoder.final_layernorm.weight"].abs().max() > 0
        changed = {name for name in wanted if not torch.equal(wanted[name], got[name])}
        assert changed <= {"output_layer.weight" if kind == "moe" else "embedding.word_embeddings.weight"}
        for name in changed:  # rounded to BF16 on the way, where a last bit may turn
            assert (got[name] - wanted[name]).norm() <= 1e-4 * wanted[name].norm()
    plain, again = (each.score_routed(batch)[1] for each in (whole, chunked))
    assert torch.equal(plain.logprobs, again.logprobs) and torch.equal(plain.draws, again.draws)


def test_the_head_s_gradient_is_added_up_in_fp32(tmp_path: Path, make_trainer: MakeTrainer, batch: TokenBatch) -> None:
    path = write_model(tmp_path / "m", moe=False, dtype=torch.float32)
    whole, chunked = (make_trainer(path, dtype=torch.float32, head_chunk_tokens=each) for each in (4096, CHUNK))
    for each in (whole, chunked):
        each.forward_backward(batch, cross_entropy(batch))
    wanted, got = gradients(whole)["output_layer.weight"], gradients(chunked)["output_layer.weight"]
    assert (got - wanted).norm() <= 1e-6 * wanted.norm()


@contextmanager
def noted():
    """The shapes of all tensors that are kept for a backward."""
    shapes: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        yield shapes


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_no_more_logits_than_a_chunks(precision, tmp_path, make_trainer, batch) -> None:
    path = write_model(tmp_path / "m", moe=False, vocab=WORDS)

    def most_logits(chunk: int) -> int:
        trainer = make_trainer(path, precision, head_chunk_tokens=chunk)
        with noted() as shapes:
            trainer.forward_backward(batch, cross_entropy(batch))
        by_token = [shape for shape in shapes if shape[-1:] == (WORDS,)]
        assert by_token
        return max(torch.Size(shape).numel() // WORDS for shape in by_token)

    assert most_logits(CHUNK) <= CHUNK < 128 < most_logits(4096)


def test_a_critic_keeps_no_logits_either(tmp_path: Path, make_trainer: MakeTrainer, layout: Any) -> None:
    path, batch = write_model(tmp_path / "m", moe=False, vocab=WORDS), random_batch()
    critic = critic_on(layout, make_trainer(path, "fp8"), path)
    with noted() as shapes:
        critic.forward_backward(batch, cross_entropy(batch))
    assert shapes and not [shape for shape in shapes if shape[-1:] == (WORDS,)]


def test_a_truncated_token_is_scored_among_what_it_was_drawn_from(dense_path: Path, make_trainer: MakeTrainer) -> None:
    """Against the whole distribution after one prefix, token by token."""
    trainer, prefix = make_trainer(dense_path, "fp8"), torch.randint(0, VOCAB, (1, 9))
    tokens = torch.cat([prefix.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, -1] = True
    batch = TokenBatch(tokens, torch.full((VOCAB,), 10), mask, 0.8)

    def scores(**how: Any) -> Tensor:
        return scored(trainer, replace(batch, **how))[:, -1].double()

    everything = scores()
    found, best = scores(truncation=Truncation(top_k=5)), everything.topk(5).indices
    assert torch.allclose(found[best], everything[best].log_softmax(0), atol=1e-5)
    supports = KeptTokenPool.of(
        mask, torch.full((VOCAB,), 2), torch.stack([tokens[:, -1], tokens[:, -1].roll(1)], 1).flatten()
    )
    found = scores(truncation=Truncation(top_k=5), supports=supports)
    pairs = torch.stack([everything, everything.roll(1)])
    assert torch.allclose(found, pairs.log_softmax(0)[0], atol=1e-5)
