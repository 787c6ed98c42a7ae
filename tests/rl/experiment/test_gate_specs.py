"""Gates that a spec may not have: each is refused with one message that names the key and what to do."""

from typing import Any

import pytest
import yaml

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import parse_experiment

MINIMAL = {"model": {"path": "/m"}, "data": {"train": "/t"}}
METRIC = "mismatch/tis_clipfrac"
EXACT = "mismatch/exact_frac"
KL = "mismatch/k3_kl"


def message(*gates: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(UserError) as error:
        parse_experiment({**MINIMAL, "gates": list(gates), **sections})
    assert "\n" not in str(error.value)
    return str(error.value)


def gate(action: str = "warn", **fields: Any) -> dict[str, Any]:
    bound = {} if "below" in fields else {"above": 0.05}
    return {"metric": METRIC, **bound, "action": action, **fields}


@pytest.mark.parametrize(
    ("gates", "sections", "named"),
    [
        ([gate(metric="mismatch/tis_clipfrac_")], {}, ["gates.0.metric", "Did you mean mismatch/tis_clipfrac?"]),
        ([gate("restart")], {}, ["gates.0.action", "'restart'", "checkpoint_and_stop"]),
        ([gate(recover=0.06)], {}, ["gates.0", "recover=0.06", "at most above"]),
        ([gate(below=0.5, recover=0.4)], {}, ["gates.0", "recover=0.4", "at least below"]),
        ([gate(tis_cap=1.5)], {}, ["gates.0", "tis_cap=1.5", "Remove tis_cap"]),
        ([gate("tighten_tis")], {"algorithm": {"name": "grpo", "tis_cap": None}}, ["gates.0.tis_cap", "None"]),
        ([gate("tighten_tis", tis_cap=0.5)], {}, ["gates.0.tis_cap", "0.5", "greater than or equal to 1"]),
        (
            [gate("enable_r3")],
            {"numerics": {"router_replay": "replay"}},
            ["gates.0.action", "numerics.router_replay=replay", "record"],
        ),
        (
            [gate(metric="mismatch/router_agreement_layer_3")],
            {},
            ["gates.0.metric", "mismatch/router_agreement_layer_3 with numerics.router_replay=off"],
        ),
        (
            [gate(metric="mismatch/redraw_frac")],
            {"guard": {"redraws": 0}},
            ["gates.0.metric", "mismatch/redraw_frac with numerics.mode=exact, guard.redraws=0", "exact mode"],
        ),
        *(
            ([gate(action, **bound)], {"numerics": numerics}, ["gates.0", f"{action} on", "no batch is trained on"])
            for action in ("skip_step", "resync")
            for bound in (
                {"metric": "mismatch/train_rollout_logprob_abs_diff_max", "above": 0.0},
                {"metric": EXACT, "below": 1.0},
            )
            for numerics in ({"mode": "native"}, {"trainer": "bf16"})
        ),
        ([gate()], {"algorithm": {"name": "sft"}}, [f"{METRIC} with algorithm.name=sft", "that samples answers"]),
        ([gate(metric="rollout/turns_mean")], {}, ["gates.0.metric", "environment=single_turn", "an environment"]),
        ([gate(metric="train/rejected_tokens")], {}, ["rejection=None", "algorithm.rejection or algorithm.veto"]),
        ([gate(metric="eval/hard/pass@2")], {"eval": {"problems": 0}}, ["eval.problems=0", "eval.problems above 0"]),
        ([gate("skip_step", metric="rollout/reward_failures")], {}, ["after a step's decision"]),
        *(
            (
                [gate(action, metric=metric)],
                {},
                ["gates.0.action", f"{action} on {metric}", "warn, tighten_tis, enable_r3 or checkpoint_and_stop"],
            )
            for action, metric in [
                ("skip_step", "train/lr"),
                ("resync", "gates/stale_resyncs"),
                ("bf16_both", "eval/accuracy"),
                ("skip_step", "sync/seconds"),
                ("skip_step", "perf/step_seconds"),
                ("skip_step", "tracking/nonfinite_dropped"),
            ]
        ),
        (
            [gate(metric="train/kl")],
            {},
            ["gates.0.metric", "train/kl with algorithm.name=grpo", "algorithm.kl above 0"],
        ),
        ([gate(metric="critic/loss")], {}, ["gates.0.metric", "expected an algorithm with a critic"]),
        (
            [gate(metric="train/clip_fraction")],
            {"algorithm": {"name": "grpo", "updates_per_batch": 2, "epochs": 3}},
            ["gates.0.metric", "train/clip_fraction with 6 updates of a batch", "the first pass of a step"],
        ),
        (
            [gate("skip_step", metric="critic/explained_variance")],
            {"algorithm": {"name": "ppo"}},
            ["after a step's dec"],
        ),
        (
            [gate(metric="mismatch/abs_diff_max_pos_64")],
            {"rollout": {"max_new_tokens": 64}},
            ["gates.0.metric", "mismatch/abs_diff_max_pos_64 with rollout.max_new_tokens=64", "a lower one"],
        ),
        (
            [gate(metric="rollout/tokens_age_2")],
            {},
            ["gates.0.metric", "rollout/tokens_age_2 with rollout.staleness=0"],
        ),
        ([gate(above=0.2), gate(below=0.3)], {}, ["gates.1", "below 0.3", "gates.0 has above 0.2", "at most 0.2"]),
        ([gate(below=0.3), gate(above=0.2)], {}, ["gates.1", "above 0.2", "gates.0 has below 0.3"]),
    ],
)
def test_contradictions_are_refused(gates: list[dict[str, Any]], sections: dict[str, Any], named: list[str]) -> None:
    said = message(*gates, **sections)
    for part in named:
        assert part in said


def test_an_unknown_key_of_a_gate_is_answered_with_the_nearest() -> None:
    assert "cooldown_steps" in message(gate(cooldown=3))
    assert "nonfinite_loss" in message(guard={"nonfinite": "skip"})


def test_gates_that_can_be_satisfied_are_accepted() -> None:
    spec = parse_experiment(
        {
            **MINIMAL,
            "numerics": {"router_replay": "record"},
            "rollout": {"max_new_tokens": 65},
            "gates": [
                gate(metric="mismatch/abs_diff_max_pos_64"),
                gate(metric="rollout/tokens_age_0"),
                gate(metric=KL, above=0.3),
                gate(metric=KL, below=0.3),
                gate("skip_step", above=0.3, recover=0.1, cooldown_steps=2),
                gate("tighten_tis", tis_cap=1.5),
                gate("enable_r3"),
                gate("bf16_both"),
                gate("resync", metric=EXACT, below=1.0),
                gate("resync", metric="mismatch/train_rollout_logprob_abs_diff_max", above=0.0),
                gate("checkpoint_and_stop", metric="eval/accuracy", below=0.1),
                gate("checkpoint_and_stop", metric="mismatch/router_agreement_layer_3", below=0.5),
            ],
            "guard": {"nonfinite_loss": "skip", "capsules": 2},
        }
    )
    assert [rule.bound for rule in spec.gates[2:4]] == ["above 0.3", "below 0.3"]
    assert spec.guard.nonfinite_loss == "skip" and spec.guard.capsule_weights


def test_off_without_quotes_is_what_yaml_makes_of_it() -> None:
    spec = parse_experiment({**MINIMAL, "numerics": yaml.safe_load("{router_replay: off}")})
    assert spec.numerics.router_replay == "off"
