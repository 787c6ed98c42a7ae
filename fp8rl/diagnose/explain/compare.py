"""Compares a running trainer and a running engine op by op, and removes one cause of their mismatch after another."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8rl.diagnose.explain.causes import SELF_FLOOR, Cause, Comparison, explains
from fp8rl.diagnose.explain.differences import expert_differences, fit_temperature, op_differences
from fp8rl.models import Model
from fp8rl.models.program import CHOSEN, TARGETS
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
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

Recording = dict[str, Tensor]
"""Tensors by name, as `models.program.Trace` records them."""
TRACED_TOKENS = 2048
"""The most tokens whose ops are compared. They are whole sequences, those that disagree most first; at least one."""


def compare(
    trainer: TrainerGroup,
    endpoint: Endpoint,
    batch: TokenBatch,
    numerics: NumericsConfig,
    model: Model,
    *,
    wrong: Sequence[str] | None = None,
) -> Comparison:
    """Compare a trainer of one rank and an engine op by op, and remove one cause of mismatch after another.

    Args:
        batch: sampled sequences with `rollout_logprobs`, and with `train_logprobs` if they were recorded.
        numerics, model: the same on both sides; in exact mode.
        wrong: tensors that were wrong in the engine that sampled the batch; None: not known.

    Raises EngineError: the engine failed.
    """
    batch = _over_all_tokens(trainer, batch) if batch.truncation.cuts else batch
    recorded, scored = batch.fields["rollout_logprobs"], trainer.score(batch)
    trained = batch.fields.get("train_logprobs", scored)
    d = trained - recorded
    traced = batch.select(_most_different(d, batch))
    trace = trainer.apply(_trace_ops, traced)[0]
    spec = numerics.rollout_spec
    expected = Manifest.merged(trainer.weight_version, spec, trainer.apply(would_hold, spec))

    async def ask() -> tuple[dict[str, str], Recording]:
        async with EngineClient(endpoint) as client:
            return await client.manifest(), await ask_engine(client, trace)

    held, answer = asyncio.run(ask())
    # The traced sequences, [T]. Index t is about the token that follows the token at t.
    ours, theirs = trace["logprobs:logprobs"].double(), answer["free.logprobs:logprobs"].double()
    record, sampled = _behind(traced.fields["rollout_logprobs"], traced).double(), _behind(traced.loss_mask, traced)
    live = _mean_abs((ours - theirs)[sampled])
    reproduced = _mean_abs((theirs - record)[sampled])
    at, logits = sampled & record.isfinite(), answer["free.lm_head:logits"][:, : model.sizes.vocab_size]
    fit = fit_temperature(logits[at], trace[TARGETS][at], record[at]) if at.any() else None
    causes = []
    if fit is not None and explains(fit, batch.temperature, reproduced):
        fitted = trainer.score(replace(batch, temperature=fit.temperature)) - recorded
        before, after = (_mean_abs(x[batch.loss_mask]) for x in (d, fitted))
        note = f"temperature {fit.temperature:.4g} in place of {batch.temperature:.4g}"
        causes.append(Cause("sampler", before, after, note))
    chosen = [answer[f"free.{site.key(CHOSEN)}"] for site in model.forward.sites() if CHOSEN in site.op.writes]
    if chosen:
        replayed = _behind(_replayed(trainer, traced, torch.stack(chosen, 1)), traced).double()
        after = _mean_abs((replayed - theirs)[sampled])
        causes.append(Cause("routing", live, after, "the engine's experts in the trainer (R3)"))
    rescored = _mean_abs((scored - trained)[batch.loss_mask])
    causes += _other_scales(trainer, batch, numerics, {"engine": reproduced, "trainer": rescored})
    sides = model.forward, model.sizes.experts, trace, answer
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
        traced_tokens=int(sampled.sum()),
        live_abs_diff_mean=live,
        reproduced=reproduced,
        ops=tuple(op_differences(*sides)),
        experts=tuple(expert_differences(*sides)),
        settings={
            site.op.name: (name, trace[name].item(), answer[name].item())
            for site in model.forward.sites()
            for name in site.op.form.constants
            if trace[name] != answer[name]
        },
        causes=tuple(causes),
    )


def _trace_ops(trainer: Trainer, batch: TokenBatch) -> Recording:
    from fp8rl.trainer.op_trace import trace_ops  # on the rank: the driver does without megatron

    return trace_ops(trainer, batch)


def _over_all_tokens(trainer: TrainerGroup, batch: TokenBatch) -> TokenBatch:
    """Replace log-probabilities under truncation by log-probabilities over the vocabulary, which ops compute."""
    whole = replace(batch, truncation=EVERY_TOKEN, supports=None)
    added = trainer.score(whole) - trainer.score(batch)
    fields = {name: values + added for name, values in batch.fields.items()}
    return replace(whole, fields=fields, loss_mask=batch.loss_mask & added.isfinite())


def _replayed(trainer: TrainerGroup, traced: TokenBatch, chosen: Tensor) -> Tensor:
    """Score the traced sequences with the engine's experts. chosen: [T, L, k]."""
    routes = torch.full((*traced.tokens.shape, *chosen.shape[1:]), UNKNOWN, dtype=torch.int16)
    routes[traced.real_tokens()] = chosen.to(torch.int16)
    return trainer.score(replace(traced, routes=routes, replay=True))


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


def _most_different(d: Tensor, batch: TokenBatch) -> list[int]:
    """Return as many rows as fit TRACED_TOKENS, by mean |d| over sampled tokens, the largest first."""
    budget = TRACED_TOKENS
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


async def ask_engine(client: EngineClient, trace: Recording) -> Recording:
    """Run the engine's ops on the trainer's inputs, and its forward pass on the tokens. Data pass over a shared disk.
    Raises EngineError: the engine failed, or its answer is damaged."""
    with tempfile.TemporaryDirectory(prefix="fp8rl-ops-") as folder:
        recording = Path(folder) / "trainer.safetensors"
        save_file(trace, recording)
        digest = await client.probe(recording)
        path = recording.with_name(ANSWER)
        if file_sha256(path) != digest:
            raise EngineError(f"{path}: found other bytes than the engine wrote. Look for a full disk, and try again.")
        return load_file(path)
