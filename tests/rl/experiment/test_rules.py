"""Each rule of a spec is broken by some spec, whose refusal says what to do, and doing that mends it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from fp8rl.numerics.core.errors import Rule, UserError
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.gate_rules import GATE_RULES, PAIR_RULES, NumberedGate
from fp8rl.rl.experiment.rules import RULES
from tests.support.remedies import mended, overridden, unchecked

SFT, OPD = "algorithm={name: sft}", "algorithm={name: opd}"
BF16 = "numerics={preset: bf16, trainer: bf16, rollout: bf16}"


def gates(*gates: str) -> str:
    return f"gates=[{', '.join(f'{{{gate}}}' for gate in gates)}]"


CAP = "metric: mismatch/tis_clipfrac, above: 0.05"
EXACT = "metric: mismatch/exact_frac, below"
WARN, TIGHTER = f"{CAP}, action: warn", f"{CAP}, action: tighten_tis, tis_cap"

# Of each rule, in its order: what is found, the overrides that break it, and in words alone (`Raise ...`), a way out.
SPECS: list[tuple[str, list[str], list[str]]] = [
    ("'single_turn with the reward environment", ["rewards=[{function: environment}]"], ["environment=guess"]),
    ("'in_place with numerics.mode=exact'", ["sync.pause=in_place"], []),
    ("'1 with algorithm.name=sft'", [SFT, "rollout.staleness=1"], []),
    ("'record with rollout.staleness=1'", ["rollout.staleness=1", "numerics.router_replay=record"], []),
    ("'3 with trainer.tp=2'", ["rollout.tp=3", "trainer.tp=2"], []),
    (
        "'5 with rollout.prompts_per_step=4'",
        ["rollout.prompts_per_step=4", "algorithm.updates_per_batch=5"],
        ["algorithm.updates_per_batch=4", "rollout.prompts_per_step=5"],
    ),
    (
        "'1 with algorithm.dynamic_sampling=true'",
        ["algorithm={name: dapo}", "rollout.group_size=1"],
        ["rollout.group_size=2"],
    ),
    ("'true with sync.transport=disk'", ["sync.delta=true", "sync.transport=disk"], []),
    ("'true with rollout.staleness=1'", ["rollout.sleep=true", "rollout.staleness=1"], []),
    ("'true with sync.delta=true'", ["rollout.sleep=true", "sync.delta=true"], []),
    ("'true with sync.transport=distributed'", ["rollout.sleep=true", "sync.transport=distributed"], []),
    ("'an adapter with numerics.mode=native'", ["adapter={}", "numerics.mode=native"], []),
    ("'0.1 with an adapter'", ["adapter={}", "trainer.router_bias_rate=0.1"], []),
    ("'true, and no frozen weights are served", ["sync.shared_base=true"], []),
    ("'null with algorithm.name=opd'", [OPD], []),
    ("'/t with algorithm.name=grpo, which uses no teacher'", ["teacher={path: /t}"], []),
    ("'0.7 with a teacher'", [OPD, "teacher={path: /t}", "rollout.temperature=0.7"], []),
    ("'skip'", [SFT, "guard.nonfinite_loss=skip"], []),
]
GATES: list[tuple[str, list[str], list[str]]] = [
    (
        "'skip_step'",
        [SFT, gates("metric: train/loss, above: 1.0, action: skip_step")],
        [gates("metric: train/loss, above: 1.0, action: warn"), gates()],
    ),
    (
        "'drift/k3_kl with rollout.staleness=0'",
        [gates("metric: drift/k3_kl, above: 0.1")],
        ["rollout.staleness=1", gates(WARN)],
    ),
    (
        "'rollout/tokens_age_1 with rollout.staleness=0'",
        [gates("metric: rollout/tokens_age_1, above: 0.1")],
        ["rollout.staleness=1", gates("metric: rollout/tokens_age_0, above: 0.1")],
    ),
    (
        "'train/clip_fraction with 2 updates of a batch'",
        [gates("metric: train/clip_fraction, above: 0.1"), "algorithm.updates_per_batch=2"],
        [gates("metric: train/grad_norm, above: 0.1")],
    ),
    (
        '"resync on gates/stale_resyncs, which is measured',
        [gates("metric: gates/stale_resyncs, above: 2.0, action: resync")],
        [gates("metric: gates/stale_resyncs, above: 2.0, action: checkpoint_and_stop")],
    ),
    (
        "'skip_step on mismatch/exact_frac below 1.0 with numerics.mode=exact, trainer=bf16",
        [gates(f"{EXACT}: 1.0, action: skip_step"), "numerics.trainer=bf16"],
        [gates(f"{EXACT}: 0.5, action: skip_step"), "numerics.trainer=fp8"],
    ),
    ("2.0", [gates(f"{TIGHTER}: 2.0")], [gates(f"{TIGHTER}: 1.5"), "algorithm.tis_cap=3.0"]),
    ("'enable_r3 with numerics.router_replay=off'", [gates(f"{CAP}, action: enable_r3")], [gates(WARN)]),
    (
        "'bf16_both with both sides in BF16'",
        [BF16, gates(f"{CAP}, action: bf16_both")],
        [gates(WARN), "numerics={preset: fp8_block_pow2, trainer: fp8}"],
    ),
]
PAIRS: list[tuple[str, list[str], list[str]]] = [
    ("'warn on mismatch/tis_clipfrac above 0.05'", [gates(WARN, f"{WARN}, for_steps: 3")], [gates(WARN)]),
    (
        "'mismatch/exact_frac below 0.3, while gates.0 has above 0.2'",
        [gates("metric: mismatch/exact_frac, above: 0.2", f"{EXACT}: 0.3")],
        [gates("metric: mismatch/exact_frac, above: 0.2", f"{EXACT}: 0.2")],
    ),
]


def rows() -> list[Any]:
    tables: Sequence[tuple[Sequence[Rule[Any]], list[tuple[str, list[str], list[str]]]]]
    tables = ((RULES, SPECS), (GATE_RULES, GATES), (PAIR_RULES, PAIRS))
    return [(rule, *case) for rules, cases in tables for rule, case in zip(rules, cases, strict=True)]


def refusals(rule: Rule[Any], experiment: Experiment) -> list[str]:
    """What a rule of any of the three tables refuses of the spec."""
    numbered = [NumberedGate(index, gate, experiment) for index, gate in enumerate(experiment.gates)]
    subjects = [experiment] if rule in RULES else numbered if rule in GATE_RULES else combinations(numbered, 2)
    return [str(refusal) for subject in subjects if (refusal := rule.refusal(subject)) is not None]


@pytest.mark.parametrize(("rule", "found", "overrides", "in_words"), rows())
def test_a_rule_refuses_in_one_line_and_its_remedy_mends(
    rule: Rule[Any], found: str, overrides: list[str], in_words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        overridden(overrides)
    error = refused.value
    assert refusals(rule, unchecked(overrides)) == [str(error)] and "\n" not in str(error)
    assert error.key and error.found.startswith(found) and error.expected and error.remedy.endswith(".")
    ways = [*mended(error.remedy, overrides), *([*overrides, way] for way in in_words)]
    assert ways
    for way in ways:
        assert refusals(rule, overridden(way)) == []


@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_engines_may_sleep_with_a_sync_that_sends_everything(transport: str) -> None:
    assert overridden(["rollout.sleep=true", f"sync.transport={transport}"]).rollout.sleep
