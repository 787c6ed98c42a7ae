"""Do both sides give one log-probability? The measured difference, beside the noise floor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fp8rl.diagnose.difference import Difference, described, shown_number
from fp8rl.diagnose.preflight.check import Check, judged
from fp8rl.diagnose.preflight.floor import against_trainer
from fp8rl.diagnose.preflight.static import SAME_PRECISION
from fp8rl.numerics.config import Mode, NumericsConfig
from fp8rl.rl.run.stack import Stack
from fp8rl.trainer.step.batch import TokenBatch

NATIVE_LIMIT = 6.0
"""How many times the mean of BF16/BF16 the mean abs(d) may be in native mode. Measured with FP8 on both sides: 4.2 on
the example, 3.6 on a 4-layer model, on which FP8 rollout with a BF16 trainer was at 7.3, and unequal scale formats at
9.7."""
OTHER_TEMPERATURES = (0.8, 1.25)
"""Factors of temperatures that must explain the sampled tokens' log-probabilities worse than the spec's."""


def trainer_against_engine(numerics: NumericsConfig, measured: Difference, bf16: Difference | None) -> Check:
    """The agreement itself. Exact mode: d == 0. Native mode: at most NATIVE_LIMIT times BF16/BF16, if that is known."""
    mixed = (numerics.trainer == "bf16") != (numerics.rollout == "bf16")
    ok, expected = _bound(numerics.mode, measured, bf16)
    return judged(
        "logprobs",
        "trainer against engine",
        ok,
        found=described(measured),
        expected=expected,
        remedy=SAME_PRECISION if mixed else _REMEDY[numerics.mode],
    )


def noise_floor(mode: Mode, floors: Mapping[str, Difference]) -> list[Check]:
    """Each floor as a check: exact mode has none to speak of, in native mode it is what it is."""
    return [
        judged(
            "logprobs",
            f"floor: {name}",
            floor.zero if mode == "exact" else floor.nonfinite == 0 and floor.tokens > 0,
            found=described(floor),
            expected="d == 0 on every token" if mode == "exact" else "finite log-probabilities",
            remedy="A token's result depends on its batch on this machine, or it is not finite: run one thread "
            "(OMP_NUM_THREADS=1), and see docs/exactness.md.",
        )
        for name, floor in floors.items()
    ]


def sampler_temperature(stack: Stack, batch: TokenBatch, measured: Difference) -> Check:
    """Whether the engine's log-probabilities are those of the temperature that it was asked to sample with."""
    asked = batch.temperature
    others = {
        asked * factor: against_trainer(stack, replace(batch, temperature=asked * factor))
        for factor in OTHER_TEMPERATURES
    }
    means = {asked: measured.mean, **{t: d.mean for t, d in others.items()}}
    shown = ", ".join(f"{shown_number(mean)} at {t:g}" for t, mean in means.items())
    return judged(
        "logprobs",
        "sampler temperature",
        all(measured.mean is not None and d.mean is not None and measured.mean < d.mean for d in others.values()),
        found=f"mean |d| {shown}",
        expected=f"the smallest at rollout.temperature = {asked:g}",
        remedy="The engine samples at another temperature, or reports logprobs from before it: unset "
        "SGLANG_RETURN_ORIGINAL_LOGPROB, and compare the versions of sglang.",
    )


def _bound(mode: Mode, measured: Difference, bf16: Difference | None) -> tuple[bool, str]:
    if mode == "exact":
        return measured.zero, "d == 0 on every token"
    finite = measured.nonfinite == 0 and measured.mean is not None
    if bf16 is None or bf16.mean is None:
        return finite, "finite log-probabilities (BF16/BF16 was not measured, so there is no bound)"
    ok = finite and measured.mean is not None and measured.mean <= NATIVE_LIMIT * bf16.mean
    ratio = f", found {measured.mean / bf16.mean:.2f}" if measured.mean is not None and bf16.mean else ""
    return ok, f"mean at most {NATIVE_LIMIT:g} times BF16/BF16's {shown_number(bf16.mean)}{ratio}"


_REMEDY: dict[Mode, str] = {
    "exact": "Both sides run one precision, so an op or a weight differs: train a few steps and ask "
    "`fp8rl attribute RUN` which.",
    "native": "Compare the scale formats of both sides, or take numerics.mode=exact; `fp8rl attribute RUN` says where "
    "the difference comes from.",
}
