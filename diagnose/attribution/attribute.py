"""Where does the mismatch come from? The live trainer and engine are asked, on tokens that were sampled."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8rl.diagnose.attribution.attribution_report import Attribution, Cause, CauseName
from fp8rl.diagnose.attribution.compare import (
    TemperatureFit,
    expert_differences,
    fit_temperature,
    op_differences,
    position_differences,
    stream_differences,
)
from fp8rl.diagnose.attribution.findings import Clues, explains, one_side_quantizes, rank, uncommitted
from fp8rl.models import Model
from fp8rl.models.trace import TARGETS, OpTrace
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.errors import EngineError
from fp8rl.rollout.plugin.op_probe import ANSWER
from fp8rl.rollout.server.client import EngineClient
from fp8rl.rollout.types import Endpoint
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.trainer.step.batch import UNKNOWN, TokenBatch
from fp8rl.weight_sync.adapters import would_hold
from fp8rl.weight_sync.manifest import Manifest

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

TRACED_TOKENS = 2048
"""Tokens whose ops are compared: as many whole sequences as fit, those that disagree most first."""

Pair = tuple[TrainerGroup, Endpoint]
"""A trainer and an engine with the same weights."""


def attribute(
    trainer: TrainerGroup,
    endpoint: Endpoint,
    batch: TokenBatch,
    numerics: NumericsConfig,
    model: Model,
    *,
    resync: Callable[[], object] | None = None,
    other_pair: Callable[[NumericsConfig], AbstractContextManager[Pair]] | None = None,
    traced_tokens: int = TRACED_TOKENS,
) -> Attribution:
    """Compare a trainer of one rank and an engine op by op, and take away one cause of mismatch after another.

    Args:
        batch: sampled sequences with `rollout_logprobs`.
        numerics, model: of both sides.
        resync: brings the engine to the trainer's weights; called if the engine's are others, and they stay so.
        other_pair: opens trainer and engine with these weights in other numerics; without it, quantization and op
            definitions are not switched.
        traced_tokens: see TRACED_TOKENS; at least one sequence is traced.

    Raises:
        UserError: the trainer has several ranks.
        EngineError: the engine failed.
    """
    recorded = batch.fields["rollout_logprobs"]
    d = trainer.score(batch) - recorded
    traced = batch.select(_most_different(d, batch, traced_tokens))
    trace = trainer.apply(_trace_ops, traced)[0]
    expected = expected_manifest(trainer, numerics.rollout_spec)
    held, answer = asyncio.run(_ask(endpoint, expected, trace, traced.temperature))
    if answer is None:
        return _without_engine(model, numerics, expected, held, d, batch)

    views = _Views.of(traced, trace, answer)
    fit = _fit(views)
    causes = []
    if fit is not None and explains(fit, batch.temperature, views.reproduced, numerics.mode):
        causes.append(_sampler_cause(trainer, batch, d, fit))
    if views.chosen is not None:
        causes.append(_routing_cause(trainer, traced, views))
    if resync is not None and expected.mismatched(held):
        resync()
        causes.append(_weights_cause(endpoint, expected, traced, trace, views))
    if other_pair is not None:
        causes += _other_numerics(numerics, traced, views, other_pair)
    ops = op_differences(model.forward, trace.tensors, answer.tensors)
    experts = expert_differences(model.forward, trace.tensors, answer.tensors, views.live.abs(), views.sampled)
    clues = Clues(
        model=model,
        numerics=numerics,
        expected=expected,
        held=held,
        ops=ops,
        experts=experts,
        temperature=batch.temperature,
        fit=fit,
        reproduced=views.reproduced,
        live=views.live_mean,
        nonfinite=int((batch.loss_mask & ~recorded.isfinite()).sum()),
        settings=_settings(model, trace, answer),
        causes=causes,
    )
    return Attribution(
        findings=rank(clues),
        abs_diff_mean=_mean_abs(d[batch.loss_mask]),
        tokens=int(batch.loss_mask.sum()),
        live_abs_diff_mean=views.live_mean,
        traced_tokens=int(views.sampled.sum()),
        ops=tuple(ops),
        stream=tuple(stream_differences(model.forward, trace.tensors, answer.tensors)),
        causes=tuple(causes),
        experts=tuple(experts),
        positions=tuple(position_differences(d, batch.loss_mask)),
    )


@dataclass(frozen=True)
class _Views:
    """The traced sequences end to end, [T]: index t speaks of the token behind the token at t.

    trainer, engine: log-probabilities of the trainer, and of the engine's own forward. recorded: as the batch has them.
    scored: there is a next token in the sequence. sampled: and the engine sampled it.
    logits: the engine's [T, V]. targets: the next tokens. chosen: the engine's experts [T, L, k], None if dense.
    """

    trainer: Tensor
    engine: Tensor
    recorded: Tensor
    scored: Tensor
    sampled: Tensor
    logits: Tensor
    targets: Tensor
    chosen: Tensor | None

    @classmethod
    def of(cls, batch: TokenBatch, trace: OpTrace, answer: EngineAnswer) -> _Views:
        return cls(
            trainer=trace.tensors["logprobs:out.logprobs"].double(),
            engine=answer.tensors["free.logprobs"].double(),
            recorded=_behind(batch.fields["rollout_logprobs"], batch).double(),
            scored=_behind(batch.real_tokens(), batch),
            sampled=_behind(batch.loss_mask, batch),
            logits=answer.tensors["free.logits"],
            targets=trace.tensors[TARGETS],
            chosen=answer.tensors.get("free.chosen"),
        )

    @property
    def live(self) -> Tensor:
        """Trainer minus engine, as they are now."""
        return self.trainer - self.engine

    @property
    def live_mean(self) -> float:
        """Mean |d| of trainer and engine over the sampled tokens."""
        return _mean_abs(self.live[self.sampled])

    @property
    def reproduced(self) -> float:
        """Mean |d| of the engine, as it is now, and the record."""
        return _mean_abs((self.engine - self.recorded)[self.sampled])


def _trace_ops(trainer: Trainer, batch: TokenBatch) -> OpTrace:
    from fp8rl.trainer.step.op_trace import trace_ops  # on the rank: the driver does without megatron

    return trace_ops(trainer, batch)


async def _ask(
    endpoint: Endpoint, expected: Manifest, trace: OpTrace, temperature: float
) -> tuple[dict[str, str], EngineAnswer | None]:
    """What the engine holds, and its answer; None from an engine that was left within an update."""
    async with EngineClient(endpoint) as client:
        held = (await client.manifest()).entries
        return held, None if uncommitted(expected, held) else await ask_engine(client, trace, temperature)


def _without_engine(
    model: Model, numerics: NumericsConfig, expected: Manifest, held: dict[str, str], d: Tensor, batch: TokenBatch
) -> Attribution:
    """All that can be said of an engine that computes nothing."""
    clues = Clues(model=model, numerics=numerics, expected=expected, held=held, temperature=batch.temperature)
    return Attribution(
        findings=rank(clues),
        abs_diff_mean=_mean_abs(d[batch.loss_mask]),
        tokens=int(batch.loss_mask.sum()),
        positions=tuple(position_differences(d, batch.loss_mask)),
    )


def _sampler_cause(trainer: TrainerGroup, batch: TokenBatch, d: Tensor, fit: TemperatureFit) -> Cause:
    fitted = trainer.score(replace(batch, temperature=fit.temperature)) - batch.fields["rollout_logprobs"]
    before, after = (_mean_abs(x[batch.loss_mask]) for x in (d, fitted))
    return Cause("sampler", before, after, f"temperature {fit.temperature:.4g} in place of {batch.temperature:.4g}")


def _routing_cause(trainer: TrainerGroup, traced: TokenBatch, views: _Views) -> Cause:
    assert views.chosen is not None
    replayed = trainer.score(replace(traced, routes=_routes(views.chosen, traced), replay=True))
    after = _mean_abs((_behind(replayed, traced).double() - views.engine)[views.sampled])
    return Cause("routing", views.live_mean, after, "the engine's experts in the trainer (R3)")


def _weights_cause(endpoint: Endpoint, expected: Manifest, traced: TokenBatch, trace: OpTrace, views: _Views) -> Cause:
    """After the engine was synced."""
    _, answer = asyncio.run(_ask(endpoint, expected, trace, traced.temperature))
    assert answer is not None
    return Cause("weights", views.live_mean, _Views.of(traced, trace, answer).live_mean, "a verified sync")


def _other_numerics(
    numerics: NumericsConfig,
    traced: TokenBatch,
    views: _Views,
    other_pair: Callable[[NumericsConfig], AbstractContextManager[Pair]],
) -> Iterator[Cause]:
    """What takes another trainer and another engine; nothing where both sides compute the same."""
    native = numerics.mode == "native"
    switches: list[tuple[CauseName, NumericsConfig, str]] = []
    if one_side_quantizes(numerics) or (native and numerics.rollout != "bf16"):
        switches.append(("quantization", replace(numerics, trainer="bf16", rollout="bf16"), "both sides in BF16"))
    exact = _exact(numerics)
    if exact is not None:
        switches.append(("op definitions", exact, "the shared ops on both sides"))
    for name, changed, note in switches:
        with other_pair(changed) as (trainer, endpoint):
            trace = trainer.apply(_trace_ops, traced)[0]
            _, answer = asyncio.run(
                _ask(endpoint, expected_manifest(trainer, changed.rollout_spec), trace, traced.temperature)
            )
        assert answer is not None
        yield Cause(name, views.live_mean, _Views.of(traced, trace, answer).live_mean, note)


def _exact(numerics: NumericsConfig) -> NumericsConfig | None:
    """Native numerics on the shared ops; None if they are exact already, or exact mode refuses the spec."""
    if numerics.mode == "exact":
        return None
    try:
        return replace(numerics, mode="exact")
    except UserError:
        return None


def _fit(views: _Views) -> TemperatureFit | None:
    """The temperature of the record by the engine's own logits; None where nothing finite was recorded."""
    at = views.sampled & views.recorded.isfinite()
    return fit_temperature(views.logits[at], views.targets[at], views.recorded[at]) if at.any() else None


def _most_different(d: Tensor, batch: TokenBatch, budget: int) -> list[int]:
    """Rows in the order of their mean |d| over sampled tokens, the largest first, as many as fit the budget."""
    used = batch.loss_mask & d.isfinite()
    means = torch.where(used, d.abs(), 0.0).sum(1) / used.sum(1).clamp(min=1)
    chosen: list[int] = []
    for row in means.argsort(descending=True, stable=True).tolist():
        budget -= int(batch.lengths[row])
        if budget >= 0 or not chosen:
            chosen.append(row)
    return chosen


def _behind(values: Tensor, batch: TokenBatch) -> Tensor:
    """[B, S] by token -> [T], rows end to end, each token with the value of the one behind it (0 at a row's end)."""
    return torch.cat([torch.cat((row[1:n], row.new_zeros(1))) for row, n in zip(values, batch.lengths.tolist())])


def _routes(chosen: Tensor, batch: TokenBatch) -> Tensor:
    """Experts [T, L, k] of the rows end to end -> `TokenBatch.routes`."""
    routes = torch.full((*batch.tokens.shape, *chosen.shape[1:]), UNKNOWN, dtype=torch.int16)
    routes[batch.real_tokens()] = chosen.to(torch.int16)
    return routes


def _settings(model: Model, trace: OpTrace, answer: EngineAnswer) -> dict[str, tuple[str, float, float]]:
    return {
        place.op.name: (name, trace.settings[name], answer.settings[name])
        for place in model.forward.places()
        for name in place.op.form.constants
        if trace.settings[name] != answer.settings[name]
    }


def _mean_abs(values: Tensor) -> float:
    """Over the finite ones; 0 if there are none."""
    finite = values[values.isfinite()].double()
    return finite.abs().mean().item() if finite.numel() else 0.0


# Weights in the engine that are not the trainer's, by digest.


def expected_manifest(trainer: TrainerGroup, spec: QuantSpec) -> Manifest:
    """What an engine that serves `spec` must hold at the trainer's version."""
    return Manifest.merged(trainer.weight_version, spec, trainer.apply(would_hold, spec))


# Both sides on the same tokens: the trainer's ops recorded, and the engine's answer to the recording.


@dataclass(frozen=True)
class EngineAnswer:
    """What an engine made of a recorded forward pass.

    tensors: see `rollout.plugin.op_probe.ANSWER`. settings: constants of the engine's ops, such as `rope_theta`.
    """

    tensors: dict[str, Tensor]
    settings: dict[str, float]


async def ask_engine(client: EngineClient, trace: OpTrace, temperature: float) -> EngineAnswer:
    """The engine's own ops on the trainer's inputs, and its own forward of the same tokens. Host and disk are shared.

    Raises:
        EngineError: the engine failed, or its answer is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="fp8rl-ops-") as folder:
        recording = Path(folder) / "trainer.safetensors"
        save_file(trace.tensors, recording, {"temperature": repr(temperature)})
        digest = (await client.probe(recording)).sha256
        path = recording.with_name(ANSWER)
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise EngineError(f"{path}: found other bytes than the engine wrote. Look for a full disk, and try again.")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return EngineAnswer(tensors, json.loads(file.metadata()["settings"]))
