"""Compares a running trainer and a running engine op by op, and removes one cause of their mismatch after another."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8rl.diagnose.explain.causes import SELF_FLOOR, Cause, Comparison, explains
from fp8rl.diagnose.explain.differences import expert_differences, fit_temperature, op_differences, stream_differences
from fp8rl.models import Model
from fp8rl.models.trace import TARGETS, OpTrace
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.files import file_sha256
from fp8rl.numerics.sampling import EVERY_TOKEN
from fp8rl.rollout.engine.plugin.op_probe import ANSWER
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import Endpoint, EngineError
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.trainer.step.batch import UNKNOWN, TokenBatch
from fp8rl.weight_sync.frozen import would_hold
from fp8rl.weight_sync.manifest import Manifest

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

TRACED_TOKENS = 2048
"""The most tokens whose ops are compared. They are whole sequences, those that disagree most first."""


def compare(
    trainer: TrainerGroup,
    endpoint: Endpoint,
    batch: TokenBatch,
    numerics: NumericsConfig,
    model: Model,
    *,
    wrong: Sequence[str] | None = None,
    traced_tokens: int = TRACED_TOKENS,
) -> Comparison:
    """Compare a trainer of one rank and an engine op by op, and remove one cause of mismatch after another.

    Args:
        batch: sampled sequences with `rollout_logprobs`, and with `train_logprobs` if they were recorded.
        numerics, model: the same on both sides.
        wrong: tensors that were wrong in the engine that sampled the batch; None: not known.
        traced_tokens: see TRACED_TOKENS; at least one sequence is traced.

    Raises:
        UserError: the numerics are native, or the trainer has several ranks.
        EngineError: the engine failed.
    """
    check_exact(numerics)
    batch = _over_all_tokens(trainer, batch) if batch.truncation.cuts else batch
    recorded, scored = batch.fields["rollout_logprobs"], trainer.score(batch)
    trained = batch.fields.get("train_logprobs", scored)
    d = trained - recorded
    traced = batch.select(_most_different(d, batch, traced_tokens))
    trace = trainer.apply(_trace_ops, traced)[0]
    spec = numerics.rollout_spec
    expected = Manifest.merged(trainer.weight_version, spec, trainer.apply(would_hold, spec))
    held, answer = asyncio.run(_ask(endpoint, trace, traced.temperature))
    views = _Views.of(traced, trace, answer)
    at = views.sampled & views.recorded.isfinite()
    fit = fit_temperature(views.logits[at], views.targets[at], views.recorded[at]) if at.any() else None
    causes = []
    if fit is not None and explains(fit, batch.temperature, views.reproduced):
        causes.append(_without_sampler(trainer, batch, d, fit.temperature))
    if views.chosen is not None:
        causes.append(_without_routing(trainer, traced, views, views.chosen))
    rescored = _mean_abs((scored - trained)[batch.loss_mask])
    causes += _other_scales(trainer, batch, numerics, {"engine": views.reproduced, "trainer": rescored})
    sides = trace.tensors, answer.tensors
    return Comparison(
        model=model,
        numerics=numerics,
        expected=expected,
        held=held,
        temperature=batch.temperature,
        fit=fit,
        wrong=wrong,
        tokens=int(batch.loss_mask.sum()),
        abs_diff_mean=_mean_abs(d[batch.loss_mask]),
        nonfinite=int((batch.loss_mask & ~recorded.isfinite()).sum()),
        traced_tokens=int(views.sampled.sum()),
        live_abs_diff_mean=views.live_mean,
        reproduced=views.reproduced,
        ops=tuple(op_differences(model.forward, *sides)),
        experts=tuple(expert_differences(model.forward, *sides)),
        stream=tuple(stream_differences(model.forward, *sides)),
        settings={
            site.op.name: (name, trace.settings[name], answer.settings[name])
            for site in model.forward.sites()
            for name in site.op.form.constants
            if trace.settings[name] != answer.settings[name]
        },
        causes=tuple(causes),
    )


def check_exact(numerics: NumericsConfig) -> None:
    """Refuse native mode, in which both sides do not run one program."""
    if numerics.mode == "native":
        remedy = "See `fp8rl report` for log-probabilities, and `fp8rl doctor SPEC` for tensors."
        raise user_error("numerics.mode", "native", "exact, to compare one program op by op", remedy)


@dataclass(frozen=True)
class _Views:
    """The traced sequences end to end, [T]. Index t is about the token that follows the token at t."""

    trainer: Tensor
    """Log-probabilities of the trainer."""
    engine: Tensor
    """Log-probabilities of the engine's own forward pass."""
    recorded: Tensor
    """The batch's recorded log-probabilities of the engine."""
    sampled: Tensor
    """True where the sequence has a next token that the engine sampled."""
    logits: Tensor
    """Logits [T, V] of the engine."""
    targets: Tensor
    """The next tokens."""
    chosen: Tensor | None
    """The engine's experts [T, L, k], None if dense."""

    @classmethod
    def of(cls, batch: TokenBatch, trace: OpTrace, answer: OpTrace) -> _Views:
        return cls(
            trainer=trace.tensors["logprobs:out.logprobs"].double(),
            engine=answer.tensors["free.logprobs"].double(),
            recorded=_behind(batch.fields["rollout_logprobs"], batch).double(),
            sampled=_behind(batch.loss_mask, batch),
            logits=answer.tensors["free.logits"],
            targets=trace.tensors[TARGETS],
            chosen=answer.tensors.get("free.chosen"),
        )

    @property
    def live(self) -> Tensor:
        """Trainer minus engine, as both compute now."""
        return self.trainer - self.engine

    @property
    def live_mean(self) -> float:
        """Mean |d| of trainer and engine over the sampled tokens."""
        return _mean_abs(self.live[self.sampled])

    @property
    def reproduced(self) -> float:
        """Mean |d| between the engine as it computes now and the record."""
        return _mean_abs((self.engine - self.recorded)[self.sampled])


def _trace_ops(trainer: Trainer, batch: TokenBatch) -> OpTrace:
    from fp8rl.trainer.op_trace import trace_ops  # on the rank: the driver does without megatron

    return trace_ops(trainer, batch)


async def _ask(endpoint: Endpoint, trace: OpTrace, temperature: float) -> tuple[dict[str, str], OpTrace]:
    """Ask the engine for its weights' digests, and for its answer to the trace."""
    async with EngineClient(endpoint) as client:
        return (await client.manifest()).entries, await ask_engine(client, trace, temperature)


def _over_all_tokens(trainer: TrainerGroup, batch: TokenBatch) -> TokenBatch:
    """Replace log-probabilities under truncation by log-probabilities over the vocabulary, which ops compute."""
    whole = replace(batch, truncation=EVERY_TOKEN, supports=None)
    added = trainer.score(whole) - trainer.score(batch)
    fields = {name: values + added for name, values in batch.fields.items()}
    return replace(whole, fields=fields, loss_mask=batch.loss_mask & added.isfinite())


def _without_sampler(trainer: TrainerGroup, batch: TokenBatch, d: Tensor, temperature: float) -> Cause:
    """Score the batch at the temperature at which the engine seems to have sampled. d: without this change."""
    fitted = trainer.score(replace(batch, temperature=temperature)) - batch.fields["rollout_logprobs"]
    before, after = (_mean_abs(x[batch.loss_mask]) for x in (d, fitted))
    return Cause("sampler", before, after, f"temperature {temperature:.4g} in place of {batch.temperature:.4g}")


def _without_routing(trainer: TrainerGroup, traced: TokenBatch, views: _Views, chosen: Tensor) -> Cause:
    """Score the traced sequences with the engine's experts. chosen: [T, L, k]."""
    routes = torch.full((*traced.tokens.shape, *chosen.shape[1:]), UNKNOWN, dtype=torch.int16)
    routes[traced.real_tokens()] = chosen.to(torch.int16)
    replayed = _behind(trainer.score(replace(traced, routes=routes, replay=True)), traced).double()
    after = _mean_abs((replayed - views.engine)[views.sampled])
    return Cause("routing", views.live_mean, after, "the engine's experts in the trainer (R3)")


def _other_scales(
    trainer: TrainerGroup, batch: TokenBatch, numerics: NumericsConfig, before: Mapping[str, float]
) -> Iterator[Cause]:
    """Score with other scales for each side that does not reproduce its record. The trainer scores for both sides.

    before: mean |d| between each side and its record.
    """
    sides = {"engine": (numerics.rollout, "rollout_logprobs"), "trainer": (numerics.trainer, "train_logprobs")}
    for side, (precision, record) in sides.items():
        if precision == "bf16" or before[side] <= SELF_FLOOR:
            continue
        for scale, roles in product(("pow2", "fp32"), (("weight", "activation"), ("weight",))):
            spec = numerics.spec.override({role: {"scale": scale} for role in roles})
            if spec != numerics.spec:
                with suppress(UserError):  # MXFP8 has no other scales
                    trainer.set_numerics(replace(numerics, trainer=precision, spec=spec))
                    after = _mean_abs((trainer.score(batch) - batch.fields[record])[batch.loss_mask])
                    yield Cause("scales", before[side], after, f"{scale} scales of {' and '.join(roles)} in the {side}")
    trainer.set_numerics(numerics)


def _most_different(d: Tensor, batch: TokenBatch, budget: int) -> list[int]:
    """Return as many rows as fit the budget of tokens, by mean |d| over sampled tokens, the largest first."""
    used = batch.loss_mask & d.isfinite()
    means = torch.where(used, d.abs(), 0.0).sum(1) / used.sum(1).clamp(min=1)
    chosen: list[int] = []
    for row in means.argsort(descending=True, stable=True).tolist():
        budget -= int(batch.lengths[row])
        if budget >= 0 or not chosen:
            chosen.append(row)
    return chosen


def _behind(values: Tensor, batch: TokenBatch) -> Tensor:
    """Return values [B, S] as [T], rows end to end. Each token gets the value of its next token (0 at a row's end)."""
    return torch.cat([torch.cat((row[1:n], row.new_zeros(1))) for row, n in zip(values, batch.lengths.tolist())])


def _mean_abs(values: Tensor) -> float:
    """Average the absolute finite values; 0 if there are none."""
    finite = values[values.isfinite()].double()
    return finite.abs().mean().item() if finite.numel() else 0.0


async def ask_engine(client: EngineClient, trace: OpTrace, temperature: float) -> OpTrace:
    """Run the engine's ops on the trainer's inputs, and its forward pass on the tokens. Data pass over a shared disk.
    Raises EngineError: the engine failed, or its answer is damaged."""
    with tempfile.TemporaryDirectory(prefix="fp8rl-ops-") as folder:
        recording = Path(folder) / "trainer.safetensors"
        save_file(trace.tensors, recording, {"temperature": repr(temperature)})
        digest = await client.probe(recording)
        path = recording.with_name(ANSWER)
        if file_sha256(path) != digest:
            raise EngineError(f"{path}: found other bytes than the engine wrote. Look for a full disk, and try again.")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return OpTrace(tensors, json.loads(file.metadata()["settings"]))
