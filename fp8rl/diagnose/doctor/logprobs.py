"""Checks that both sides agree on log-probabilities, and measures the noise floor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fp8rl.diagnose.measure import difference
from fp8rl.diagnose.report import Difference, Finding, shown_number
from fp8rl.numerics.config import Mode, NumericsConfig
from fp8rl.rl.run.run import Run
from fp8rl.rollout.engine.server.client import SCORED_SHORT_OF
from fp8rl.trainer.step.batch import TokenBatch

SAME_PRECISION = "Run both sides in one precision: numerics.trainer=fp8 numerics.rollout=fp8, or bf16 for both."
NATIVE_LIMIT = 6.0
"""The most that mean abs(d) may be in native mode, in multiples of BF16/BF16's. Measured with FP8 on both sides: 4.2 on
the example, 3.6 on a 4-layer model, which had 7.3 with a BF16 trainer and FP8 rollout, and 9.7 with unequal scales."""
OTHER_TEMPERATURES = (0.8, 1.25)
"""Factors of the spec's temperature: these temperatures must explain the log-probabilities worse than the spec's."""


def judged(agreement: str, name: str, ok: bool, found: str, expected: str, remedy: str = "") -> Finding:
    """Make a check's finding. agreement: what both sides must have in common: spec, bytes or logprobs."""
    return Finding(f"same {agreement}, {name}", found, expected, remedy, "ok" if ok else "error")


def trainer_against_engine(numerics: NumericsConfig, measured: Difference, bf16: Difference | None) -> Finding:
    """Check that trainer and engine agree on log-probabilities.

    Exact mode: d == 0. Native mode: at most NATIVE_LIMIT times BF16/BF16, if that is known.
    """
    ok, expected = measured.zero, "d == 0 on every token"
    remedy = "An op or a weight differs. Train a few steps; then `fp8rl explain RUN` names it."
    if numerics.mode == "native":
        remedy = (
            "Compare the scale formats of both sides, or set numerics.mode=exact; then `fp8rl explain RUN` names the "
            "op or weight that differs."
        )
        ok = measured.nonfinite == 0 and measured.mean is not None
        expected = "finite log-probabilities (BF16/BF16 was not measured, so there is no bound)"
        if bf16 is not None and bf16.mean is not None:
            ok = ok and (measured.mean or 0.0) <= NATIVE_LIMIT * bf16.mean
            ratio = f", found {measured.mean / bf16.mean:.2f}" if measured.mean is not None and bf16.mean else ""
            expected = f"mean at most {NATIVE_LIMIT:g} times BF16/BF16's {shown_number(bf16.mean)}{ratio}"
    if (numerics.trainer == "bf16") != (numerics.rollout == "bf16"):
        remedy = SAME_PRECISION
    return judged("logprobs", "trainer against engine", ok, str(measured), expected, remedy)


def noise_floor(mode: Mode, floors: Mapping[str, Difference]) -> Iterator[Finding]:
    """Yield each floor as a check. A floor must be 0 in exact mode; in native mode it is only reported."""
    expected = "d == 0 on every token" if mode == "exact" else "finite log-probabilities"
    remedy = (
        "A token's result depends on its batch on this machine, or it is not finite: run one thread "
        "(OMP_NUM_THREADS=1), and see docs/exactness.md."
    )
    for name, floor in floors.items():
        ok = floor.zero if mode == "exact" else floor.nonfinite == 0 and floor.tokens > 0
        yield judged("logprobs", f"floor: {name}", ok, str(floor), expected, remedy)


def sampler_temperature(run: Run, batch: TokenBatch, measured: Difference) -> Finding:
    """Check that the engine's log-probabilities belong to the temperature that it was asked to sample at."""
    asked = batch.temperature
    others = {
        t: against_trainer(run, replace(batch, temperature=t)).mean for t in (asked * f for f in OTHER_TEMPERATURES)
    }
    ok = all(measured.mean is not None and mean is not None and measured.mean < mean for mean in others.values())
    means = ", ".join(f"{shown_number(mean)} at {t:g}" for t, mean in ({asked: measured.mean} | others).items())
    expected = f"the smallest mean at rollout.temperature = {asked:g}"
    remedy = "The engine samples at another temperature, or ignores it in its logprobs. Unset "
    remedy += "SGLANG_RETURN_ORIGINAL_LOGPROB, and compare the versions of sglang."
    return judged("logprobs", "sampler temperature", ok, f"mean |d| {means}", expected, remedy)


# The noise floor: how far log-probabilities differ where nothing is wrong. One engine against itself, when the same
# tokens are computed in another way: prefilled instead of decoded, or alone instead of in a batch. And trainer against
# engine, both in BF16, so without any quantization.

ALONE = 8
"""Sequences that are scored one by one."""


def against_trainer(run: Run, batch: TokenBatch) -> Difference:
    """Compare trainer and engine on the tokens that the engine sampled."""
    return difference(run.trainer.score(batch), batch.fields["rollout_logprobs"], batch.loss_mask)


def prefill_against_decode(run: Run, batch: TokenBatch) -> Difference:
    """Compare the engine's log-probabilities of its own tokens: as sampled, and prefilled with their prompts.

    batch: sampled at temperature 1 from the whole vocabulary, because SGLang scores given tokens only so.
    """
    scored, known = _scored(run, batch)
    return difference(scored, batch.fields["rollout_logprobs"], batch.loss_mask & known)


def alone_against_together(run: Run, batch: TokenBatch) -> Difference:
    """Compare log-probabilities of the longest rows: prefilled row by row, and prefilled all at once."""
    longest = batch.select(batch.lengths.argsort(descending=True, stable=True)[:ALONE].tolist())
    together, known = _scored(run, longest)
    alone = torch.zeros_like(together)
    for row in reversed(range(longest.rows)):
        values = _scored(run, longest.select([row]))[0][0]
        alone[row, : len(values)] = values
    return difference(alone, together, known)


def _scored(run: Run, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return prefilled log-probabilities [B, S], and a mask of those that exist. Index 0 has none, nor have tokens
    beyond the engine's longest prompt."""
    longest = run.experiment.rollout.context_length - SCORED_SHORT_OF
    sequences = [row[: min(int(n), longest)].tolist() for row, n in zip(batch.tokens, batch.lengths, strict=True)]
    rows = run.engines.score(sequences).result()
    values, known = torch.zeros(len(rows), batch.width), torch.zeros(len(rows), batch.width, dtype=torch.bool)
    for row, logprobs in enumerate(rows):
        values[row, 1 : 1 + len(logprobs)] = torch.tensor(logprobs)
        known[row, 1 : 1 + len(logprobs)] = True
    return values, known
