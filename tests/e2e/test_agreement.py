"""The three agreements, on the real engine and the real trainer: same spec, same bytes, same log-probabilities."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open

from fp8rl.diagnose.attribution import attribute
from fp8rl.diagnose.attribution.attribution_report import Finding
from fp8rl.models import read_model
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.architecture import architectures
from fp8rl.models.tensors import base_name
from fp8rl.numerics import ops
from fp8rl.numerics.sampling import Truncation
from fp8rl.numerics.spec import PRESETS
from fp8rl.rl.mismatch.logprobs import token_versions
from fp8rl.rl.run.batching import batch_from_trajectories
from fp8rl.rollout.engine.protocol import ADAPTER_SCALE
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.types import Group, SamplingParams, StaleWeightsError
from fp8rl.trainer.step.batch import UNKNOWN, TokenBatch
from fp8rl.weight_sync import bridge
from fp8rl.weight_sync.bridge import SyncReport
from fp8rl.weight_sync.manifest import SyncError
from fp8rl.weight_sync.served import convert_checkpoint
from fp8rl.weight_sync.transports import TensorTransport
from tests.support import faults
from tests.support.rig import ALONE, SHARED_PREFIX, Pipeline, Rig, Setup, differences, prompts
from tests.support.syncs import push

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Tests and cases stand in an order in which neighbours share an engine.
TWO_RANKS = Setup("moe", k_splits=2, layout=(("tp", 2),))
BOTH_TWO_RANKS = replace(TWO_RANKS, engine_tp=2)
MERGED = AdapterSection(rank=8, alpha=256.0, mode="merged", experts="shared")
SEPARATE = AdapterSection(rank=8, alpha=256.0)
GLM = Setup("glm4_moe", bf16_ends=1, k_splits=2, layout=(("router_bias_rate", 0.3),), router_replay="record")
LATENT = Setup("latent", bf16_ends=1, k_splits=2, router_replay="record")
LINEAR = Setup("qwen3_next", bf16_ends=1, k_splits=2)
LESS_MEMORY = (("head_chunk_tokens", 96), ("packing", True))
TP_EP = (("tp", 2), ("ep", 2))
PP = (("pp", 2), ("recompute", "experts"), *LESS_MEMORY)
ARCHITECTURES = {
    "glm-bf16-ends": GLM,
    "olmoe-fp32-scales-bf16-ends-tp2-ep2": replace(GLM, model="olmoe", preset="fp8_block_fp32", layout=TP_EP),
    "qwen2-mxfp8-bf16-ends-tp2": Setup("qwen2", preset="mxfp8", bf16_ends=1, k_splits=2, layout=(("tp", 2),)),
    "dense-ironwood-engine-tp2-pp2-recomputing": Setup("dense", preset="ironwood", k_splits=2, engine_tp=2, layout=PP),
    "flash-adapters-engine-tp2-fp8-kv": Setup(
        "glm4_moe_lite", bf16_ends=1, k_splits=2, engine_tp=2, adapter=SEPARATE, kv="fp8"
    ),
    "qwen3.5-moe-adapters-engine-tp2-tp2-ep2-packed-fp8-kv": Setup(
        "qwen3_5_moe_text", k_splits=2, engine_tp=2, layout=(*TP_EP, *LESS_MEMORY), adapter=SEPARATE, kv="fp8"
    ),
    "glm-5": Setup("glm_moe_dsa", router_replay="record"),
    "latent-bf16-ends": LATENT,
}
"""A covering set: each product that a spec may name, each preset and way of the trainer, not every pair, nor
architectures that differ from one of these in names or sizes. Every architecture equals transformers
(tests/trainer/megatron), trainers of several ranks give the log-probabilities of one (tests/trainer/distributed), and
`python -m lab.bench layouts` has whole runs of every architecture."""
WAYS = {
    "next-bf16-ends": LINEAR,
    "moe-ep2-fp8-wires-recomputing-fp8-kv": Setup(
        "moe",
        k_splits=2,
        kv="fp8",
        layout=(
            *(("ep", 2), ("dp", 2), ("gradient_wire", "e4m3"), ("weight_gather", "e4m3"), ("recompute", "layer")),
            *LESS_MEMORY,
        ),
    ),
    "moe-merged-shared-tp2": replace(TWO_RANKS, adapter=MERGED),
}
ADAPTED = Setup("moe", adapter=SEPARATE)
ONE_BASE = Setup("moe", layout=(("ep", 2), ("dp", 2)), adapter=SEPARATE, shared_base=True)


def wrong_yarn(trainer: Any) -> None:
    for layer in trainer.model.decoder.layers:
        core = layer.self_attention.core_attention
        core.rope_scaling = replace(core.rope_scaling, factor=2 * core.rope_scaling.factor)


def no_groups(trainer: Any) -> None:
    for router in routers(trainer):
        router.chooses = replace(router.chooses, groups=1, kept_groups=1)


def late_rows(trainer: Any) -> None:
    """The convolution reads each token's rows one place too early."""

    def forward(conv: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return ops.causal_conv(torch.cat((x[:1], x[:-1])), conv.weight, lengths)[0]

    for net in linear_layers(trainer):
        net.conv1d.forward = forward.__get__(net.conv1d)


def decay_of_another_head(trainer: Any) -> None:
    own = trainer.model.decoder.layers[0].self_attention.core_attention

    def forward(mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, *others: Any) -> Any:
        return type(own).forward(own, mixed, b, a, a_log.roll(1), *others)

    own.forward = forward


def linear_layers(trainer: Any) -> list[Any]:
    return [net for layer in trainer.model.decoder.layers if hasattr(net := layer.self_attention, "conv1d")]


def restored(trainer: Any) -> None:
    sizes = trainer.definition.sizes
    for net in linear_layers(trainer):
        for module in (net.conv1d, net.core_attention):
            vars(module).pop("forward", None)
    for layer in trainer.model.decoder.layers:
        layer.self_attention.core_attention.rope_scaling = sizes.rope_scaling
    for router in routers(trainer):
        router.chooses = sizes.sigmoid_router


def routers(trainer: Any) -> list[Any]:
    return [layer.mlp.router for layer in trainer.model.decoder.layers if hasattr(layer.mlp, "router")]


DEFINITIONS: dict[str, tuple[Setup, Callable[[Any], None], str, tuple[int, ...], str]] = {
    "YaRN": (
        LATENT,
        wrong_yarn,
        "attention",
        (0, 1, 2),
        "the factor of the rope scaling is 8 in the trainer and 4 in the engine",
    ),
    "groups": (LATENT, no_groups, "topk", (1, 2), "topk differs in every layer"),
    "late rows": (LINEAR, late_rows, "conv", (0, 2), "conv differs in every layer"),
    "decay of another head": (LINEAR, decay_of_another_head, "delta", (0,), "delta differs in layer 0"),
}
"""What is planted in the trainer of a setup, and the op and layers that it is found in."""
CUTS = {"top-p-top-k": Truncation(top_p=0.9, top_k=20), "min-p": Truncation(min_p=0.05)}


def test_every_product_and_every_preset_meets_an_engine(models: dict[str, Path]) -> None:
    setups = [*ARCHITECTURES.values(), *WAYS.values()]
    met = {kinds for setup in setups for kinds in read_model(models[setup.model]).architecture.kinds}
    assert met == {kinds for architecture in architectures().values() for kinds in architecture.kinds}
    assert {setup.preset for setup in setups} == PRESETS.keys() - {"bf16"}


def test_a_stale_expert_bias_is_named_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All biases move with each update, and those of one layer do not arrive."""
    pipeline = rig.open(GLM)
    pipeline.train_step(pipeline.sample(1.0, count=4))
    message = failed_sync(pipeline, monkeypatch, faults.missed_bias)
    assert f"1 of {len(served_tensors_of(pipeline))} tensors" in message and faults.BIAS in message
    pipeline.resume()  # nobody looked
    first = first_finding(pipeline, pipeline.sample(1.0, count=4))
    pipeline.sync()
    assert (first.cause, first.op, first.layers, first.tensors) == ("weights", "topk", (2,), (faults.BIAS,))
    assert "layer 2 topk differs" in first.text and "e_score_correction_bias are not those of version" in first.text


@pytest.mark.parametrize("setup", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_every_sampled_token_of_each_architecture_agrees_before_and_after_an_update(
    rig: Rig, tmp_path: Path, setup: Setup
) -> None:
    agrees_before_and_after_an_update(rig, setup, tmp_path)


def test_half_a_pair_is_named_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine holds q_a_proj and kv_a_proj as one parameter; one of both does not arrive."""
    pipeline = rig.open(LATENT)
    pipeline.train_step(pipeline.sample(1.0, count=4))
    assert faults.HALF in failed_sync(pipeline, monkeypatch, faults.half_a_pair)
    pipeline.resume()  # nobody looked
    first = first_finding(pipeline, pipeline.sample(1.0, count=4))
    pipeline.sync()
    assert (first.cause, first.op, first.layers) == ("weights", "qkv_a", (1,))
    assert faults.HALF in first.tensors and {name.removesuffix("_scale_inv") for name in first.tensors} == {faults.HALF}


@pytest.mark.parametrize("fault", DEFINITIONS)
def test_another_definition_is_named_first(rig: Rig, fault: str) -> None:
    """In all layers of the trainer that have such an op."""
    setup, plant, op, layers, says = DEFINITIONS[fault]
    pipeline = rig.open(setup)
    batch = pipeline.sample(1.0, count=4)
    pipeline.trainer.apply(plant)
    try:
        first = first_finding(pipeline, batch)
    finally:
        pipeline.trainer.apply(restored)
    assert (first.cause, first.op, first.layers) == ("op", op, layers) and says in first.text


@pytest.mark.parametrize("setup", WAYS.values(), ids=WAYS)
def test_every_sampled_token_agrees_before_and_after_an_update(rig: Rig, tmp_path: Path, setup: Setup) -> None:
    agrees_before_and_after_an_update(rig, setup, tmp_path)


def test_a_bf16_trainer_beside_an_fp8_engine_disagrees(rig: Rig) -> None:
    """The contrast: what finds no difference below does find one here."""
    pipeline = rig.open(Setup("moe", trainer="bf16", k_splits=2))
    batch = pipeline.sample(1.0, count=6)
    d = differences(pipeline.trainer.score(batch), batch)
    assert d.abs().mean() > 3e-3
    assert (d == 0).float().mean() < 0.1


def test_prefixes_are_cached_within_a_weight_version_only(rig: Rig) -> None:
    pipeline = rig.open(TWO_RANKS)
    shared = prompts(0)[-1].token_ids
    assert cached_tokens(pipeline, shared) == 0
    assert cached_tokens(pipeline, [*shared[:SHARED_PREFIX], 9, 9, 9]) >= SHARED_PREFIX
    pipeline.sync()
    assert cached_tokens(pipeline, shared) == 0


def test_a_tensor_damaged_on_the_way_is_named_and_stops_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Scales that change places and experts that do not arrive: tests/rollout/engine/plugin/test_weights.py."""
    pipeline = rig.open(TWO_RANKS)
    pipeline.train_step(pipeline.sample(1.0, count=4))
    message = failed_sync(pipeline, monkeypatch, faults.flipped_bit, tmp_path / "manifest.json")
    assert re.findall(r": (model\.\S+): found", message) == [faults.MATRIX]
    assert f"1 of {len(served_tensors_of(pipeline))} tensors" in message
    expected = json.loads((tmp_path / "manifest.json").read_text())["entries"]
    assert len(expected) == len(served_tensors_of(pipeline))
    assert_paused_until_a_good_sync(pipeline)


def test_a_transport_that_breaks_midway_stops_the_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's other rank is not left behind in the export, and the half that arrived is never computed with."""
    pipeline = rig.open(TWO_RANKS)
    pipeline.train_step(pipeline.sample(1.0, count=4))
    assert "the cable was pulled" in failed_sync(pipeline, monkeypatch, faults.broken_transport)
    assert_paused_until_a_good_sync(pipeline)


def test_weights_that_were_broadcast_agree(rig: Rig) -> None:
    """Twice, because the process group lives for one sync."""
    pipeline = rig.open(TWO_RANKS)
    for seed in (0, 1):
        pipeline.train_step(pipeline.sample(1.0, seed, count=4))
        report = pipeline.sync("distributed")
        assert (report.mismatched_tensors, report.verified_tensors) == (0, len(served_tensors_of(pipeline)))
        batch = pipeline.sample(0.7, seed, count=4)
        assert_equal(pipeline.trainer.score(batch), batch)


def test_tokens_of_a_stale_weight_version_are_refused(rig: Rig) -> None:
    pipeline = rig.open(TWO_RANKS)
    pipeline.train_step(pipeline.sample(1.0, count=4))
    version = pipeline.trainer.weight_version
    with pytest.raises(StaleWeightsError, match=f"at version {version - 1}, expected all at version {version}"):
        pipeline.sample(1.0, count=1)
    pipeline.sync()
    assert rig.run(one_token(pipeline))[0].weight_versions == [version]


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_every_token_agrees_under_top_p_top_k_and_min_p(rig: Rig, cut: Truncation) -> None:
    """The trainer finds what each was drawn from in its own logits, and the engine says the same."""
    pipeline = rig.open(TWO_RANKS)
    batch = pipeline.sample(0.9, count=6, cut=cut)
    scored = pipeline.trainer.score_routed(batch)
    assert_equal(scored.logprobs, batch)
    assert scored.draws is not None and scored.draws[batch.loss_mask].equal(batch.tokens[batch.loss_mask])
    whole = pipeline.trainer.score(replace(batch, truncation=Truncation()))
    assert (differences(whole, batch) < 0).float().mean() > 0.5
    carried = pipeline.sample(0.9, count=6, cut=cut, supports=True)
    assert carried.tokens.equal(batch.tokens) and carried.supports is not None
    assert_equal(pipeline.trainer.score(carried), carried)


def test_every_token_of_the_model_agrees_in_a_conversation_and_what_it_is_told_has_no_loss(rig: Rig) -> None:
    pipeline = rig.open(TWO_RANKS)
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
    scored = pipeline.trainer.score_routed(batch)
    assert_equal(scored.logprobs, batch)
    assert scored.draws is not None
    assert scored.draws[batch.loss_mask].equal(batch.tokens[batch.loss_mask]), "the trainer draws them all again"
    longest = max(answers, key=lambda answer: len(answer.prompt_ids))
    whole = longest.prompt_ids + longest.token_ids
    assert cached_tokens(pipeline, whole) >= len(whole) - 6, "each turn is in the cache when the next one begins"


def test_a_conversation_goes_on_under_new_weights_and_its_later_turns_are_theirs(rig: Rig) -> None:
    pipeline = rig.open(TWO_RANKS)
    first, endpoint = pipeline.trainer.weight_version, pipeline.endpoint
    batch, turns = pipeline.sample(1.0, count=4), []

    def update() -> None:
        if pipeline.trainer.weight_version == first:
            pipeline.train_step(batch)
            pipeline.bridge("tensor").sync([endpoint])

    async def environment(conversation: Conversation) -> None:
        turns.append(await conversation.sample(max_new_tokens=9))
        while len(turns) < 4:  # all conversations have had their first turn
            await asyncio.sleep(0.05)
        await asyncio.to_thread(lambda: turn_by_turn(update))
        conversation.tell("13),")
        await conversation.sample(max_new_tokens=9)

    lock = threading.Lock()

    def turn_by_turn(do: Callable[[], None]) -> None:
        with lock:
            do()

    answers = pipeline.converse(environment, count=4)
    assert {tuple(dict.fromkeys(answer.weight_versions)) for answer in answers} == {(first, first + 1)}
    talk = batch_from_trajectories(answers, 1.0)
    fresh = token_versions(answers, talk.loss_mask) == first + 1
    d = (pipeline.trainer.score(talk) - talk.fields["rollout_logprobs"])[talk.loss_mask]
    assert (d[fresh[talk.loss_mask]] == 0).all() and (d[~fresh[talk.loss_mask]] != 0).float().mean() > 0.5


def test_only_changes_are_sent_and_an_engine_that_is_wrong_gets_everything(rig: Rig, tmp_path: Path) -> None:
    pipeline = rig.open(BOTH_TWO_RANKS)
    first = pipeline.sync(delta=True)
    assert first.bytes == first.weight_bytes
    unchanged = pipeline.sync("distributed", delta=True)
    assert (unchanged.mismatched_tensors, unchanged.weight_bytes) == (0, first.weight_bytes)
    assert unchanged.bytes < first.bytes / 100
    pipeline.train_step(pipeline.sample(1.0, count=4))
    changed = pipeline.sync("distributed", tmp_path / "manifest.json", delta=True)
    assert_verified(pipeline, changed, tmp_path / "manifest.json")
    batch = pipeline.sample(0.7, count=4)
    assert_equal(pipeline.trainer.score(batch), batch)

    version, spec = pipeline.trainer.weight_version, pipeline.setup.numerics.rollout_spec
    tampered = faults.Tampered(TensorTransport(1 << 20), faults.flipped_bit)
    assert push(pipeline.trainer, tampered, spec, [pipeline.endpoint], version)[2]
    with pytest.raises(SyncError, match="not what the trainer sent"):
        pipeline.sync(delta=True)
    mended = pipeline.bridge(delta=True).sync([pipeline.endpoint], whole=True)
    assert mended.mismatched_tensors == 0 and mended.bytes == mended.weight_bytes


def tampered(fault: Callable[..., Any]) -> Callable[..., None]:
    """What a fault on the way does to a sync."""

    def plant(pipeline: Pipeline, patch: pytest.MonkeyPatch) -> None:
        make = bridge.make_transport
        patch.setattr(bridge, "make_transport", lambda *args: faults.Tampered(make(*args), fault))

    return plant


def another_scale(pipeline: Pipeline, patch: pytest.MonkeyPatch) -> None:
    """The trainer has another one than the engine was started with."""
    patch.setattr(type(pipeline.setup), "beside", AdapterSection(rank=SEPARATE.rank, alpha=SEPARATE.alpha / 2))


def changed_base(pipeline: Pipeline, patch: pytest.MonkeyPatch) -> None:
    """One bit of one code in the engine's memory, under the version that it holds."""
    transport = faults.Tampered(TensorTransport(1 << 20), faults.flipped_bit)
    spec, version = pipeline.setup.numerics.rollout_spec, pipeline.held.version
    assert version is not None and push(pipeline.trainer, transport, spec, [pipeline.endpoint], version)[2]


@pytest.mark.parametrize(
    ("plant", "names", "of_base"),
    [
        (tampered(faults.missed_adapter), [faults.ADAPTER], ""),
        (tampered(faults.adapters_of_other_experts), faults.ADAPTERS_OF_EXPERTS, ""),
        (another_scale, [ADAPTER_SCALE], ""),
        (changed_base, [faults.MATRIX], " (1 of the base, which changed in the engine under the run)"),
    ],
    ids=["not-sent", "of-other-experts", "another-scale", "changed-base"],
)
def test_a_fault_of_adapters_is_named_and_stops_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None], names: list[str], of_base: str
) -> None:
    pipeline = rig.open(ADAPTED)
    pipeline.train_step(pipeline.sample(1.0, count=4))
    assert (report := pipeline.sync()).bytes < report.weight_bytes / 2, "adapters alone"
    pipeline.train_step(pipeline.sample(1.0, count=4))
    with monkeypatch.context() as patch, pytest.raises(SyncError) as error:
        plant(pipeline, patch)
        pipeline.sync()
    count = f"{len(names)} of {len(served_tensors_of(pipeline))} tensors are not what the trainer sent: "
    assert f": {count}{', '.join(names)}{of_base}; generation stays paused" in str(error.value)
    assert_paused_until_a_good_sync(pipeline)


def test_every_sampled_token_agrees_where_trainer_and_engine_read_one_base(rig: Rig, tmp_path: Path) -> None:
    """Last of those with adapters: nobody may send such an engine the weights of the next trainer."""
    agrees_before_and_after_an_update(rig, ONE_BASE, tmp_path)


def agrees_before_and_after_an_update(rig: Rig, setup: Setup, folder: Path) -> None:
    pipeline = rig.open(setup)  # synced through the transport `tensor`
    batch = pipeline.sample(1.0, count=len(ALONE), answers=1)
    assert batch.lengths.min() < 30 < 300 < batch.lengths.max()
    step = pipeline.train_step(batch)  # its forward is the scoring at the weights that sampled
    assert_equal(step.logprobs, batch)
    assert step.draws is not None
    assert step.draws[batch.loss_mask].equal(batch.tokens[batch.loss_mask])
    assert (batch.routes is not None) == (setup.router_replay == "record")
    if batch.routes is not None:
        assert step.routes is not None
        known = batch.routes != UNKNOWN
        assert known.any((0, 1, 3)).all() and step.routes[known].equal(batch.routes[known])
    report = pipeline.sync("disk" if setup.engine_tp == 1 else "distributed", folder / "manifest.json")
    assert_verified(pipeline, report, folder / "manifest.json")
    assert (report.bytes < report.weight_bytes) == (setup.beside is not None)  # adapters alone
    assert report.version == pipeline.trainer.weight_version
    # The update was real: the same tokens have other logprobs now.
    moved = differences(pipeline.trainer.score(batch), batch)
    assert (moved != 0).float().mean() > 0.9
    # Prompts that were cached before the update, up to 300 tokens, and others that share a prefix.
    again = pipeline.sample(0.7, answers=1)
    assert_equal(pipeline.trainer.score(again), again)
    assert batch.loss_mask.sum() + again.loss_mask.sum() > 250


def first_finding(pipeline: Pipeline, batch: TokenBatch) -> Finding:
    numerics = pipeline.setup.numerics
    return attribute(pipeline.trainer, pipeline.endpoint, batch, numerics, pipeline.definition).findings[0]


def failed_sync(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any], manifest: Path | None = None
) -> str:
    """What the sync of the trainer's weights says when `fault` happens on the way."""
    make = bridge.make_transport
    with monkeypatch.context() as patch:
        patch.setattr(bridge, "make_transport", lambda *args: faults.Tampered(make(*args), fault))
        with pytest.raises(SyncError) as error:
            pipeline.sync(manifest=manifest)
    return str(error.value)


def assert_paused_until_a_good_sync(pipeline: Pipeline) -> None:
    with pytest.raises(TimeoutError):
        pipeline.rig.run(asyncio.wait_for(one_token(pipeline), 1.0))
    assert pipeline.sync().mismatched_tensors == 0
    batch = pipeline.sample(1.0, count=4)
    assert_equal(pipeline.trainer.score(batch), batch)


def assert_equal(logprobs: torch.Tensor, batch: TokenBatch) -> None:
    """d == 0 for every sampled token, bit for bit, and the tokens say something."""
    d = differences(logprobs, batch)
    assert (d == 0).all(), f"{(d != 0).sum()} of {len(d)} tokens differ, by up to {d.abs().max()}"
    assert batch.fields["rollout_logprobs"][batch.loss_mask].std() > 0.3


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
