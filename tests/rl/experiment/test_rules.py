"""Each rule of a spec, its model and its machines is broken by some spec; the refusal's remedy mends that spec."""

from __future__ import annotations

import dataclasses
import re
from functools import cache, partial

import pytest

from fp8rl.diagnose.plan.subject import read_plan_subject
from fp8rl.models.shape import Shape
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import gate_rules, rules
from fp8rl.rl.experiment.preconditions import rules as machine_rules
from fp8rl.rl.experiment.preconditions.rules import Target, broken_rules, check_target
from tests.support.experiments import experiment
from tests.support.preconditions import on
from tests.support.remedies import broken, mended, overridden, rules_of

OPD, NATIVE = "algorithm={name: opd} teacher={path: /t}", "numerics.mode=native"
CAP, LOSS = "metric: mismatch/tis_clipfrac, above: 0.05", "metric: train/loss, above: 1.0"
EXACT, SKIP = (f"metric: mismatch/exact_frac, below{rest}" for rest in ("", ": 1.0, action: skip_step"))
CLIP, STALE = "metric: train/clip_fraction, above: 0.1", "metric: gates/stale_resyncs, above: 2.0, action"
POSITION = "metric: mismatch/abs_diff_max_pos_64, above: 0.1"
LAYER = "metric: mismatch/router_agreement_layer_48, below: 0.5"
DIFFERENCE = "metric: mismatch/train_rollout_logprob_abs_diff_max, above: 0.0"
WARN, TIGHTER, GATE = f"{CAP}, action: warn", f"{CAP}, action: tighten_tis, tis_cap", "gates=[{%s}]"
ALIKE, BETWEEN = f"gates=[{{{WARN}}}, {{%s}}]", "gates=[{metric: mismatch/exact_frac, above: 0.2}, {%s}]"
BF16 = "numerics={preset: bf16, trainer: bf16, rollout: bf16}"
SHARED = "adapter={rank: 8} sync.shared_base=true"

# What is refused and found; the overrides that break the rule; what a remedy in words alone comes to, each of `|`.
SPECS = [
    ("environment: found 'single_turn with the reward env", "rewards=[{function: environment}]", "environment=guess"),
    ("sync.pause: found 'in_place with numerics.mode=exact'", "sync.pause=in_place", ""),
    ("rollout.staleness: found '1 with algorithm.name=sft'", "algorithm={name: sft} rollout.staleness=1", ""),
    ("numerics.router_replay: found 'record with", "rollout.staleness=1 numerics.router_replay=record", ""),
    ("rollout.tp: found '3 with trainer.tp=2'", "rollout.tp=3 trainer.tp=2", ""),
    ("algorithm.updates_per_batch: found '999 with", "algorithm.updates_per_batch=999", "rollout.prompts_per_step=999"),
    ("algorithm.centering: found '8 with truncation'", "algorithm.centering=8 rollout.top_p=0.9", "rollout.top_p=1.0"),
    ("rollout.group_size: found '1 with alg", "algorithm={name: dapo} rollout.group_size=1", "rollout.group_size=2"),
    ("sync.delta: found 'true with sync.transport=disk'", "sync.delta=true sync.transport=disk", ""),
    ("rollout.sleep: found 'true with rollout.staleness=1'", "rollout.sleep=true rollout.staleness=1", ""),
    ("rollout.sleep: found 'true with sync.delta=true'", "rollout.sleep=true sync.delta=true", ""),
    ("rollout.sleep: found 'true with sync.tran", "rollout.sleep=true sync.transport=distributed", ""),
    ("adapter: found 'an adapter with numerics.mode=native'", f"adapter={{}} {NATIVE}", ""),
    ("trainer.router_bias_rate: found '0.1 with an", "adapter={} trainer.router_bias_rate=0.1", ""),
    ("sync.shared_base: found 'true, and no frozen weights are served", "sync.shared_base=true", ""),
    ("sync.shared_base: found 'true, and no frozen", "adapter={mode: merged} sync.shared_base=true", ""),
    ("sync.shared_base: found 'true, and sync.transport is disk", f"{SHARED} sync.transport=disk", ""),
    ("sync.shared_base: found 'true, and an engine of 2 ranks", f"{SHARED} rollout.tp=2", ""),
    ("sync.shared_base: found 'true, and trainer and engine", f"{SHARED} numerics.rollout=bf16", ""),
    ("teacher: found 'null with algorithm.name=opd'", "algorithm={name: opd}", ""),
    ("teacher: found '/t with algorithm.name=grpo, which uses no teacher'", "teacher={path: /t}", ""),
    ("rollout.temperature: found '0.7 with a teacher'", f"{OPD} rollout.temperature=0.7", ""),
    ("guard.nonfinite_loss: found 'skip'", "algorithm={name: sft} guard.nonfinite_loss=skip", ""),
    ("gates.0.action: found 'skip_step'", f"algorithm={{name: sft}} {GATE % f'{LOSS}, action: skip_step'}", "gates=[]"),
    ("gates.0.metric: found 'drift/k3_kl with", GATE % "metric: drift/k3_kl, above: 0.1", "rollout.staleness=1"),
    ("gates.0.metric: found 'eval/no/accuracy'", GATE % "metric: eval/no/accuracy, below: 0.5", GATE % WARN),
    ("gates.0.metric: found 'rollout/tok", GATE % "metric: rollout/tokens_age_1, above: 0.1", "rollout.staleness=1"),
    (
        "gates.0.metric: found 'mismatch/abs",
        f"rollout.max_new_tokens=64 {GATE % POSITION}",
        "rollout.max_new_tokens=65",
    ),
    ("gates.0.metric: found 'train/clip_f", f"{GATE % CLIP} algorithm.updates_per_batch=2", GATE % WARN),
    ('gates.0.action: found "resync on gates/', GATE % f"{STALE}: resync", GATE % f"{STALE}: checkpoint_and_stop"),
    ("gates.0: found 'skip_step on mismatch/", f"{GATE % SKIP} numerics.trainer=bf16", "numerics.trainer=fp8"),
    (
        "gates.0: found 'resync on mismatch/",
        f"{GATE % f'{DIFFERENCE}, action: resync'} {NATIVE}",
        "numerics.mode=exact",
    ),
    ("gates.0.tis_cap: found 2.0", GATE % f"{TIGHTER}: 2.0", f"{GATE % f'{TIGHTER}: 1.5'} | algorithm.tis_cap=3.0"),
    ("gates.0.action: found 'enable_r3 with numerics.router_replay", GATE % f"{CAP}, action: enable_r3", GATE % WARN),
    ("gates.0.action: found 'bf16_both with both", f"{BF16} {GATE % f'{CAP}, action: bf16_both'}", GATE % WARN),
    ("gates.1: found 'warn on mismatch/tis_clipfrac above 0.05'", ALIKE % f"{WARN}, for_steps: 3", GATE % WARN),
    ("gates.1: found 'mismatch/exact_frac below 0.3, while", BETWEEN % f"{EXACT}: 0.3", BETWEEN % f"{EXACT}: 0.2"),
]
SMALL = "rollout={context_length: 512, max_new_tokens: 64}"
SLEEPER = f"{NATIVE} rollout.tp=2 rollout.sleep=true"
# The same, with the model and the GPU (none: CPUs) that the spec is for.
MACHINES = [
    ("qwen3_8b", "b200", "numerics.deepgemm: found 'true, and no Hopper GPU", "numerics.deepgemm=true", ""),
    ("qwen3_8b", "h200", "rollout.tp: found '8 with numerics.mode=exact on GPUs'", "rollout.tp=8", ""),
    ("qwen3_8b", "", "teacher.tp: found '2 with numerics.mode=native", f"{NATIVE} {OPD} teacher.tp=2", ""),
    ("qwen3_8b", "h200", "rollout.sleep: found 'true with rollout.tp=2 on GPUs'", SLEEPER, ""),
    ("qwen3_8b", "h200", "sync.shared_base: found 'true with 2 trainer rank(s)", f"{SHARED} trainer.dp=2", ""),
    ("qwen3_8b", "h200", "sync.shared_base: found 'true with 1", f"{SHARED} rollout.engines=2", ""),
    ("moonlight_16b_a3b", "4090", "numerics.mode: found 'exact with latent attention on GPUs of compute cap", "", ""),
    ("qwen3_8b", "h100", "numerics.preset: found 'mxfp8 with numerics.mode=exact on", "numerics.preset=mxfp8", ""),
    ("qwen3_8b", "a100", "numerics.mode: found 'exact on GPUs of compute capability 8.0'", "", ""),
    ("qwen3_8b", "rtx pro 6000", "numerics.mode: found 'exact on GPUs of compute capability 12.0'", "", ""),
    ("qwen3_8b", "a100", "numerics.rollout: found 'fp8 with numerics.mode", f"{NATIVE} numerics.trainer=bf16", ""),
    ("qwen3_8b", "h100", "numerics.trainer: found 'fp8", "numerics={mode: native, preset: mxfp8, rollout: bf16}", ""),
    ("qwen3_8b", "l40s", "numerics.trainer: found 'fp8 with numerics.mode=native on GPUs of comp", NATIVE, ""),
    ("qwen3_8b", "b200", "numerics.preset: found 'FP32 scales", f"{NATIVE} numerics.preset=fp8_block_fp32", ""),
    ("qwen3_30b_a3b", "", "trainer.pp: found '2 with", "trainer.pp=2 numerics.router_replay=record", ""),
    ("qwen3_8b", "", "numerics.router_replay: found 'replay', expected off", "numerics.router_replay=replay", ""),
    ("qwen3_8b", "", "rollout.context_length: found 9999999", "rollout.context_length=9999999", ""),
    ("qwen3_8b", "", "rollout.max_new_tokens: ", f"{SMALL} rollout.max_new_tokens=512", "rollout.max_new_tokens=511"),
    ("qwen3_8b", "", "rollout.max_total_tok", f"{SMALL} rollout.max_total_tokens=100", "rollout.max_total_tokens=512"),
    ("qwen3_30b_a3b", "", "gates.0.metric: found 'mism", f"numerics.router_replay=record {GATE % LAYER}", "gates=[]"),
    ("wide heads", "", "numerics.mode: found 'native on CPUs, with heads of 128 in a model of", NATIVE, ""),
]
ROWS = [("", "", *row) for row in SPECS] + MACHINES
MODULES = (machine_rules, gate_rules, rules)


def words(overrides: str) -> list[str]:
    """Overrides that are separated by blanks outside of brackets."""
    return re.split(r" (?=[\w.]+=)", overrides) if overrides else []


SEGMENTS = dataclasses.replace(on("h200"), expandable_segments="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
COMPILER = dataclasses.replace(on("h200"), other_compilers="/usr/local/cuda/bin/nvcc of CUDA 12.4")


@cache
def shape_of(model: str) -> Shape:
    if model != "wide heads":
        return read_plan_subject(model).shape
    shape = shape_of("qwen3_8b")
    return dataclasses.replace(shape, sizes=dataclasses.replace(shape.sizes, cpu_head_dim=64))


def checked(model: str, gpu: str, overrides: list[str]) -> None:
    spec = overridden(overrides)
    if model:
        check_target(spec, shape_of(model), on(gpu))


@pytest.mark.parametrize(("model", "gpu", "said", "overrides", "in_words"), ROWS)
def test_a_rule_refuses_and_its_remedy_mends(model: str, gpu: str, said: str, overrides: str, in_words: str) -> None:
    with pytest.raises(UserError) as refused:
        checked(model, gpu, words(overrides))
    error = refused.value
    assert str(error).startswith(said) and "\n" not in str(error) and error.expected and error.remedy.endswith(".")
    meant = [[*words(overrides), *words(way)] for way in filter(None, in_words.split(" | "))]
    ways = [*mended(error.remedy, words(overrides)), *meant]
    assert ways
    for way in ways:
        spec = overridden(way)
        others = broken_rules(spec, shape_of(model), on(gpu)) if model else ()
        assert all((other.key, other.expected) != (error.key, error.expected) for other in others)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (SEGMENTS, "PYTORCH_ALLOC_CONF: found 'PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True'.*Unset the variable"),
        (COMPILER, "CUDA_HOME: found 'nvcc: /usr/local/cuda/bin/nvcc of CUDA 12.4', expected one of CUDA .*Install"),
    ],
)
def test_what_is_wrong_with_a_machine_is_refused(target: Target, said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}"):
        check_target(experiment(), shape_of("qwen3_8b"), target)
    check_target(experiment(), shape_of("qwen3_8b"), on("h200"))
    elsewhere = dataclasses.replace(target, gpus=False, capability=None, other_compilers=None)
    check_target(experiment(), shape_of("qwen3_8b"), elsewhere)


def test_every_rule_is_broken_by_a_row() -> None:
    calls = [partial(checked, model, gpu, words(overrides)) for model, gpu, _, overrides, _ in ROWS]
    calls += [partial(check_target, experiment(), shape_of("qwen3_8b"), target) for target in (SEGMENTS, COMPILER)]
    assert set().union(*(broken(call, *MODULES) for call in calls)) == rules_of(*MODULES)


@pytest.mark.parametrize(
    ("gpu", "overrides"),
    [
        ("a100", "numerics={mode: native, trainer: bf16, rollout: bf16}"),
        ("4090", ""),
        ("h20", "numerics.deepgemm=true"),
        ("rtx pro 6000", NATIVE),
        ("b300", ""),
        ("b300", NATIVE),
        ("h200", SHARED),
        ("", f"{SHARED} trainer.dp=2 rollout.engines=2"),
        ("h200", "rollout.sleep=true sync.transport=disk"),
        ("", f"sync.pause=in_place {NATIVE} rollout.staleness=3"),
    ],
)
def test_what_a_machine_can_run_is_accepted(gpu: str, overrides: str) -> None:
    checked("qwen3_8b", gpu, words(overrides))
