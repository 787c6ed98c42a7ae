"""Every algorithm with every value of each of its settings: refused before a run starts, or good for a whole step."""

from itertools import product
from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.algorithms import ALGORITHMS
from tests.support.dry_run import CUT, dry_run
from tests.support.experiments import experiment

SETTINGS: dict[str, list[Any]] = (
    {"name": [], "dynamic_sampling": [True], "whiten_advantages": [True, False], "group_norm_std": [True, False]}
    | {"overlong": [None, {}, {"penalty": 0.0, "filter": True}, {"buffer": 3, "filter": True}, {"limit": 5}]}
    | {"clip_low": [0.1], "clip_high": [0.5], "clip_dual": [None, 3.0], "entropy": [0.01], "veto": [1e-4]}
    | {"kl": [{"loss": {"coefficient": 0.01, "estimator": name}} for name in ("k2", "k3")]}
    | {
        "updates_per_batch": [2],
        "epochs": [2],
        "ratio": ["recompute", "bypass"],
        "centering": [2],
        "loss_length": [None, 8],
    }
    | {"tis_cap": [None, 1.0], "tis_level": ["sequence"], "batch_size": [4]}
    | {"rejection": [{"name": name} for name in ("icepop", "geometric", "mis")]}
    | {"loss_aggregation": ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]}
    | {"teacher_weight": [2.0], "reward_weight": [0.5], "gamma": [0.9], "gae_lambda": [0.0, 0.9]}
    | {"critic": [{"lr": 1e-3, "decay": "linear"}], "critic_warmup": [2], "value_clip": [None]}
)
SETTINGS["kl"] += [{"reward": {"coefficient": 0.01}}]
"""Values of every key of the `algorithm` section."""
SAMPLING: list[dict[str, Any]] = [{}, {"group_size": 1}, {"staleness": 1}, {"staleness": 2, "oversample": 1.5}]
"""Of the `rollout` section, what changes what an algorithm is given."""


def cases() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    found = []
    for name, kind in sorted(ALGORITHMS.items()):
        found += [(name, {}, sampling) for sampling in SAMPLING]
        for key in kind.model_fields:
            found += [(name, {key: value}, sampling) for value, sampling in product(SETTINGS[key], SAMPLING[:3])]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_runs_a_step_with_every_setting_or_refuses_it(name: str) -> None:
    ran = 0
    for _, settings, sampling in (case for case in cases() if case[0] == name):
        said = f"{name} with {settings} and {sampling}"
        try:
            algorithm = experiment(
                rollout={"max_new_tokens": CUT, **sampling},
                algorithm={"name": name, **settings},
                teacher={"path": "/teacher"} if name == "opd" else None,
            ).algorithm
        except UserError as error:
            assert "found" in str(error) and "expected" in str(error), said
            continue
        try:
            dry_run(algorithm, sampling.get("group_size", 3))
        except Exception as error:
            raise AssertionError(said) from error
        ran += 1
    assert ran > len(SAMPLING) - 2
