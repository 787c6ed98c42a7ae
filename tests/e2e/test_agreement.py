"""The three agreements, on the real engine and the real trainer: same spec, same bytes, same log-probabilities."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open

from fp8rl.diagnose.explain.causes import Comparison
from fp8rl.diagnose.explain.compare import compare
from fp8rl.models import read_model
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.architecture import architectures
from fp8rl.models.tensors import base_name
from fp8rl.numerics.sampling import Truncation
from fp8rl.numerics.spec import PRESETS
from fp8rl.rl.algorithms.grpo import Grpo
from fp8rl.rl.run.batching import batch_from_trajectories
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.protocol import ADAPTER_SCALE
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.types import Group, SamplingParams
from fp8rl.trainer.step.batch import LIKELY_IDS, LIKELY_LOGPROBS, UNKNOWN, PassResult, Scored, TokenBatch
from fp8rl.weight_sync import bridge
from fp8rl.weight_sync.bridge import SyncReport
from fp8rl.weight_sync.manifest import SyncError
from fp8rl.weight_sync.served import convert_checkpoint
from fp8rl.weight_sync.transports.tensor import TensorTransport
from tests.support import faults
from tests.support.rig import ALONE, Pipeline, Rig, Setup, differences, prompts
from tests.support.syncs import push

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Tests and cases stand in an order in which neighbours share an engine.
MERGED = AdapterSection(rank=8, alpha=256.0, mode="merged", experts="shared")
SEPARATE = AdapterSection(rank=8, alpha=256.0)
LESS_MEMORY = (("head_chunk_tokens", 96), ("packing", True))
EP_DP, TP_EP = (("ep", 2), ("dp", 2)), (("tp", 2), ("ep", 2))
WIRES = (("gradient_wire", "e4m3"), ("weight_gather", "e4m3"), ("recompute", "layer"), ("router_bias_rate", 0.3))
GLM = Setup("glm4_moe", bf16_ends=1, k_splits=2, layout=(*EP_DP, *WIRES, *LESS_MEMORY), router_replay="record")
LATENT = Setup("latent", bf16_ends=1, k_splits=2, layout=(("router_bias_rate", 0.3),), router_replay="record")
LINEAR = Setup("qwen3_next", bf16_ends=1, k_splits=2)
COPIED_HEADS = partial(Setup, "dense", preset="ironwood", k_splits=4, engine_tp=4)
DENSE = COPIED_HEADS(layout=(("pp", 2), ("recompute", "experts"), *LESS_MEMORY))
SETUPS = {
    "glm-ep2-fp8-wires-recomputing-packed-bf16-ends": GLM,
    "latent-bf16-ends": LATENT,
    "next-bf16-ends": LINEAR,
    "dense-ironwood-engine-tp4-pp2-recomputing-packed": DENSE,
    "dense-ironwood-engine-tp4-tp2": COPIED_HEADS(layout=(("tp", 2),)),
    "olmoe-merged-fp32-scales-tp2-ep2-fp8-kv": Setup(
        "olmoe",
        preset="fp8_block_fp32",
        bf16_ends=1,
        k_splits=2,
        layout=TP_EP,
        router_replay="record",
        kv="fp8",
        adapter=MERGED,
    ),
    "qwen2-mxfp8-bf16-ends-tp2": Setup("qwen2", preset="mxfp8", bf16_ends=1, k_splits=4, layout=(("tp", 2),)),
    "glm-5-adapters-engine-tp2-fp8-kv": Setup(
        "glm_moe_dsa", bf16_ends=1, k_splits=2, engine_tp=2, router_replay="record", adapter=SEPARATE, kv="fp8"
    ),
    "qwen3.5-moe-adapters-engine-tp2-tp2-ep2-packed-fp8-kv": Setup(
        "qwen3_5_moe_text", k_splits=2, engine_tp=2, layout=(*TP_EP, *LESS_MEMORY), adapter=SEPARATE, kv="fp8"
    ),
    "moe-adapters-ep2-one-base": Setup("moe", layout=EP_DP, adapter=SEPARATE, shared_base=True),
}
"""A covering set: each product that a spec may name, each preset and way of the trainer, not every pair, nor
architectures that differ from one of these in names or sizes. Every architecture equals transformers
(tests/trainer/megatron), trainers of several ranks give the log-probabilities of one (tests/trainer/distributed), and
`python -m lab.bench layouts` has whole runs of every architecture. Nobody may send an engine of a shared base the
weights of the next trainer, so this stands last."""


def wrong_yarn(trainer: Any) -> None:
    for layer in trainer.model.decoder.layers:
        scaling = layer.sizes.rope_scaling
        layer.sizes = replace(layer.sizes, rope_scaling=replace(scaling, factor=2 * scaling.factor))


def late_rows(trainer: Any) -> None:
    """The convolution reads each token's rows one place too early."""
    from fp8rl.trainer.modules.host import LayerHost

    plain = LayerHost.convolve

    def late(host: Any, site: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return plain(host, site, torch.cat((x[:1], x[:-1])), weight)

    late.plain = plain
    LayerHost.convolve = late


def restored(trainer: Any) -> None:
    from fp8rl.trainer.modules.host import LayerHost

    LayerHost.convolve = getattr(LayerHost.convolve, "plain", LayerHost.convolve)
    for layer in trainer.model.decoder.layers:
        layer.sizes = trainer.definition.sizes


CUTS = {"top-p-top-k": Truncation(top_p=0.9, top_k=20), "min-p": Truncation(min_p=0.05)}


def test_every_product_and_every_preset_meets_an_engine(models: dict[str, Path]) -> None:
    met = {kinds for setup in SETUPS.values() for kinds in read_model(models[setup.model]).architecture.kinds}
    assert met == {kinds for architecture in architectures().values() for kinds in architecture.kinds}
    assert {setup.preset for setup in SETUPS.values()} == PRESETS.keys() - {"bf16"}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_every_token_agrees_under_top_p_top_k_and_min_p(rig: Rig, cut: Truncation) -> None:
    """The trainer finds what each was drawn from in its own logits, and the engine says the same."""
    pipeline = rig.open(GLM)
    batch = pipeline.sample(0.9, count=6, cut=cut)
    assert_agree(pipeline.trainer.score_routed(batch), batch)
    whole = pipeline.trainer.score(replace(batch, truncation=Truncation()))
    assert (differences(whole, batch) < 0).float().mean() > 0.5
    carried = pipeline.sample(0.9, count=6, cut=cut, supports=True)
    assert carried.tokens.equal(batch.tokens) and carried.supports is not None
    assert_agree(pipeline.trainer.score_routed(carried), carried)


def test_the_likeliest_tokens_have_the_trainers_bits_and_centering_changes_none(rig: Rig) -> None:
    pipeline = rig.open(GLM)
    batch = pipeline.sample(0.9, count=6, likeliest=5)
    batch = batch.with_fields(advantages=torch.where(batch.loss_mask, -1.0, 0.0))
    assert batch.fields[LIKELY_IDS].shape == (*batch.tokens.shape, 5)
    probabilities = batch.fields[LIKELY_LOGPROBS][batch.loss_mask].exp()
    assert (probabilities.diff(dim=-1) <= 0).all() and (probabilities.sum(-1) < 1).all()
    chosen = (Grpo(centering=5, tis_cap=None), Grpo(tis_cap=None), Grpo(centering=5))
    passes = [
        pipeline.trainer.forward_backward(batch, each.resolved(RolloutSection()).objective(batch)) for each in chosen
    ]
    assert_agree(passes[0], batch)
    assert len({(each.loss, each.grad_norm) for each in passes}) == 1 and passes[0].grad_norm > 0
    moved = dict(batch.fields, **{LIKELY_LOGPROBS: batch.fields[LIKELY_LOGPROBS] - 0.1})
    other = replace(batch, fields=moved)
    assert pipeline.trainer.forward_backward(other, chosen[0].objective(other)).grad_norm != passes[0].grad_norm


def test_a_sync_that_fails_says_why_and_the_engine_waits_for_a_good_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank of the trainer is left behind in the export, and the half that arrived is never computed with."""
    pipeline = rig.open(GLM)
    pipeline.train_step(pipeline.sample(1.0, count=4))
    assert "cable was pulled" in failed_sync(pipeline, monkeypatch, faults.broken_transport)
    with pytest.raises(TimeoutError):
        pipeline.rig.run(asyncio.wait_for(one_token(pipeline), 1.0))
    assert pipeline.sync().mismatched_tensors == 0
    batch = pipeline.sample(1.0, count=4)
    assert_agree(pipeline.trainer.score_routed(batch), batch)


def not_sent_is_named(
    fault: Callable[..., Any],
    op: str,
    layer: int,
    names: set[str],
    pipeline: Pipeline,
    patch: pytest.MonkeyPatch,
    _: Path,
) -> None:
    """What does not arrive after an update."""
    pipeline.train_step(pipeline.sample(1.0, count=4))
    assert min(names) in failed_sync(pipeline, patch, fault)
    pipeline.resume()  # nobody looked
    result = compared(pipeline, pipeline.sample(1.0, count=4))
    pipeline.sync()
    first = result.findings[0]
    assert first.key == "weights" and {name.removesuffix("_scale_inv") for name in first.names} == names
    assert f"layer {layer} {op}" in first.found and ("expert 5" in first.found) == (op == "experts")
    assert "in the engine are not the weights of version" in first.found
    assert [(each.layer, each.op) for each in result.ops if each.differing] == [(layer, op)]


def definition_is_named(
    plant: Callable[[Any], None], op: str, layers: tuple[int, ...], says: str, pipeline: Pipeline, *_: object
) -> None:
    """What is planted in all layers of the trainer that have such an op."""
    batch = pipeline.sample(1.0, count=4)
    pipeline.trainer.apply(plant)
    try:
        first = compared(pipeline, batch).findings[0]
    finally:
        pipeline.trainer.apply(restored)
    assert (first.key, first.names) == ("op", tuple(f"layers.{layer}.{op}" for layer in layers))
    assert says in first.found


def only_changes_are_sent_and_an_engine_that_is_wrong_gets_everything(
    pipeline: Pipeline, _: object, folder: Path
) -> None:
    first = pipeline.sync(delta=True)
    assert first.bytes == first.weight_bytes
    unchanged = pipeline.sync("distributed", delta=True)
    assert (unchanged.mismatched_tensors, unchanged.weight_bytes) == (0, first.weight_bytes)
    assert unchanged.bytes < first.bytes / 100
    pipeline.train_step(pipeline.sample(1.0, count=4))
    changed = pipeline.sync("distributed", folder / "manifest.json", delta=True)
    assert_verified(pipeline, changed, folder / "manifest.json")
    batch = pipeline.sample(0.7, count=4)
    assert_agree(pipeline.trainer.score_routed(batch), batch)

    version, spec = pipeline.trainer.weight_version, pipeline.setup.numerics.rollout_spec
    tampered = faults.Tampered(TensorTransport(1 << 20), faults.flipped_bit)
    assert push(pipeline.trainer, tampered, spec, [pipeline.endpoint], version)[2]
    with pytest.raises(SyncError, match="not what the trainer sent"):
        pipeline.sync(delta=True)
    mended = pipeline.bridge(delta=True).sync([pipeline.endpoint], whole=True)
    assert mended.mismatched_tensors == 0 and mended.bytes == mended.weight_bytes


def a_conversation_agrees_and_what_the_model_is_told_has_no_loss(pipeline: Pipeline, *_: object) -> None:
    """Each turn is in the prefix cache when the next one begins, and a sync empties it."""
    told = ("13),", "?", " and once more" * 4)

    async def environment(conversation: Conversation) -> None:
        for words in told:
            await conversation.sample(max_new_tokens=9)
            conversation.tell(words)
        await conversation.sample(max_new_tokens=5)

    answers = pipeline.converse(environment, count=5, new_tokens=200)
    batch = batch_from_trajectories(answers, 1.0, redraws=len(answers))
    assert batch.loss_mask.sum() == sum(len(answer.logprobs) for answer in answers) >= 5 * 5
    words = pipeline.tokenizer("".join(told), add_special_tokens=False).input_ids
    for row, answer in enumerate(answers):
        begin = len(answer.prompt_ids)
        after = slice(begin, begin + len(answer.token_ids))
        assert batch.tokens[row, after][~batch.loss_mask[row, after]].tolist() == words
    assert_agree(pipeline.trainer.score_routed(batch), batch)
    longest = max(answers, key=lambda answer: len(answer.prompt_ids))
    whole = longest.prompt_ids + longest.token_ids
    assert cached_tokens(pipeline, whole) >= len(whole) - 6
    pipeline.sync()
    assert cached_tokens(pipeline, whole) == 0


def agrees_before_and_after_an_update(pipeline: Pipeline, _: object, folder: Path) -> None:
    setup = pipeline.setup  # synced through the transport `tensor`
    batch = pipeline.sample(1.0, count=len(ALONE), answers=1)
    assert batch.lengths.min() < 30 < 300 < batch.lengths.max()
    assert (batch.routes is not None) == (setup.router_replay == "record")
    assert_agree(pipeline.train_step(batch), batch)  # its forward is the scoring at the weights that sampled
    report = pipeline.sync("disk" if setup.engine_tp == 1 else "distributed", folder / "manifest.json")
    assert_verified(pipeline, report, folder / "manifest.json")
    assert (report.bytes < report.weight_bytes) == (setup.beside is not None)  # adapters alone
    assert report.version == pipeline.trainer.weight_version
    # The update was real: the same tokens have other logprobs now.
    moved = differences(pipeline.trainer.score(batch), batch)
    assert (moved != 0).float().mean() > 0.9
    # Prompts that were cached before the update, up to 300 tokens, and others that share a prefix.
    again = pipeline.sample(0.7, answers=1)
    assert_agree(pipeline.trainer.score_routed(again), again)
    assert batch.loss_mask.sum() + again.loss_mask.sum() > 250


OF_EXPERT = {f"{faults.EXPERT}{kind}_proj.weight" for kind in ("gate", "up", "down")}
YARN = "the factor of the rope scaling is 8 in the trainer and 4 in the engine"
BESIDE: dict[str, tuple[Setup, Callable[[Pipeline, pytest.MonkeyPatch, Path], None]]] = {
    "bias": (LATENT, partial(not_sent_is_named, faults.missed_bias, "topk", 2, {faults.BIAS})),
    "talk": (GLM, a_conversation_agrees_and_what_the_model_is_told_has_no_loss),
    "expert": (LATENT, partial(not_sent_is_named, faults.missed_expert, "experts", 1, OF_EXPERT)),
    "YaRN": (LATENT, partial(definition_is_named, wrong_yarn, "attention", (0, 1, 2), YARN)),
    "talk-with-states": (LINEAR, a_conversation_agrees_and_what_the_model_is_told_has_no_loss),
    "rows": (LINEAR, partial(definition_is_named, late_rows, "conv", (0, 2), "the op conv differs on equal inputs")),
    "changes": (DENSE, only_changes_are_sent_and_an_engine_that_is_wrong_gets_everything),
}
"""What else is shown with a setup's engine. Attribution names a planted fault first: its op, its layers and what it
says, or the tensors."""


def cases() -> Iterator[Any]:
    for name, setup in SETUPS.items():
        yield pytest.param(setup, agrees_before_and_after_an_update, id=name)
        yield from (pytest.param(setup, check, id=what) for what, (own, check) in BESIDE.items() if own is setup)


@pytest.mark.parametrize(("setup", "check"), list(cases()))
def test_every_sampled_token_agrees_and_what_is_planted_is_named(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, check: Callable[..., None]
) -> None:
    check(rig.open(setup), monkeypatch, tmp_path)


def compared(pipeline: Pipeline, batch: TokenBatch) -> Comparison:
    return compare(pipeline.trainer, pipeline.endpoint, batch, pipeline.setup.numerics, pipeline.definition)


def failed_sync(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]) -> str:
    """What the sync of the trainer's weights says when `fault` happens on the way."""
    make = bridge.make_transport
    with monkeypatch.context() as patch:
        patch.setattr(bridge, "make_transport", lambda *args: faults.Tampered(make(*args), fault))
        with pytest.raises(SyncError) as error:
            pipeline.sync()
    return str(error.value)


def assert_agree(scored: Scored | PassResult, batch: TokenBatch) -> None:
    """d == 0 for every sampled token, bit for bit, and the tokens say something. The trainer draws them all again, and
    chooses the experts that the engine reports of every token but the last ones."""
    d = differences(scored.logprobs, batch)
    assert (d == 0).all(), f"{(d != 0).sum()} of {len(d)} tokens differ, by up to {d.abs().max()}"
    assert batch.fields["rollout_logprobs"][batch.loss_mask].std() > 0.3
    assert scored.draws is not None and scored.draws[batch.loss_mask].equal(batch.tokens[batch.loss_mask])
    if batch.routes is not None:
        assert scored.routes is not None
        computed = torch.arange(batch.width) < batch.lengths[:, None] - 1
        assert (batch.routes[~computed] == UNKNOWN).all() and (batch.routes[computed] >= 0).all()
        assert scored.routes[computed].equal(batch.routes[computed])


def assert_verified(pipeline: Pipeline, report: SyncReport, manifest: Path) -> None:
    """Everything was compared, and what ranks of an engine share once on each; experts are whole."""
    labels = list(json.loads(manifest.read_text())["entries"])
    shared = [base_name(label)[0] for label in labels if "#" in label]
    assert (report.mismatched_tensors, report.verified_tensors) == (0, len(labels))
    assert {base_name(label)[0] for label in labels} == served_tensors_of(pipeline)
    ranks = pipeline.setup.engine_tp
    assert bool(shared) == (ranks > 1) and set(Counter(shared).values()) <= {ranks}
    assert not any(".experts." in name for name in shared)


def served_tensors_of(pipeline: Pipeline) -> set[str]:
    """The tensors and scales of the directory that `convert` writes; beside them A and B of matrices, and a scale."""
    setup, path = pipeline.setup, pipeline.rig.folder / "converted"
    convert_checkpoint(pipeline.rig.models[setup.model], path, setup.numerics.rollout_spec)
    names = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names |= set(tensors.keys())
    if setup.beside is not None:
        matrices = [name for name in names if re.search(r"_proj.*\.weight$", name)]
        names |= {name.replace(".weight", f".lora_{side}.weight") for name in matrices for side in "AB"}
        names.add(ADAPTER_SCALE)
    return names


def one_token(pipeline: Pipeline) -> Any:
    sampling = SamplingParams(max_new_tokens=1)
    group = Group(prompts(0)[0], seeds=(0,))
    return pipeline.engine.generate([group], sampling)


def cached_tokens(pipeline: Pipeline, input_ids: list[int]) -> int:
    """Prompt tokens that the engine took from its prefix cache."""
    response = httpx.post(
        f"{pipeline.endpoint.url}/generate",
        json={"input_ids": input_ids, "sampling_params": {"max_new_tokens": 1}},
        headers={"Authorization": f"Bearer {pipeline.endpoint.api_key}"},
        timeout=120.0,
        trust_env=False,
    )
    return response.json()["meta_info"]["cached_tokens"]
