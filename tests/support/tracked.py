"""A run that is recorded and told to trackers, without the training; and the trajectories of a step."""

from collections.abc import Callable
from typing import Any

import pytest

from fp8rl.rl.record.rollouts import RolloutRecord
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers import Tracked, WandbSection
from fp8rl.rl.record.tracking import BackgroundTrackers, RunTracker


def record(group: int, text: str, abs_diff_mean: float | None, **changes: Any) -> RolloutRecord:
    values = {
        "prompt": f"1+{group}=?", "text": text, "reward": 1.0, "abs_diff_mean": abs_diff_mean, "group": group,
        "seed": 1, "finished": True, "prompt_ids": [1, 2], "token_ids": [3, 4], "weight_versions": [4, 4],
        "rollout_logprobs": [-0.1, -1.7320507764816284], "train_logprobs": [-0.1, -1.75], "advantage": -0.5,
    }  # fmt: skip
    return RolloutRecord(**{**values, **changes})


RECORDS = [
    record(1, "2\n#### 2", 0.0, reward_parts={"integer": 1.0, "length/long": -0.25}),
    record(1, "not shown", 0.0),
    record(2, "é", None, advantage=None),
]


def unexpected(sentence: str) -> None:
    pytest.fail(sentence)


def tracking(
    run: RunDir, *names: str, last: int = -1, lost: Callable[[str], object] = unexpected, **changes: Any
) -> RunTracker:
    """Record a run, and tell it to the trackers of these names. lost: told in any thread. changes: of `Tracked`."""
    config = {"run": {"name": "demo"}, "trainer": {"lr": 1e-4}}
    values = {"wandb": WandbSection(project="test"), "last_step": 99, "resumed": last >= 0}
    told = Tracked(run, config, **(values | changes))
    return RunTracker(run, BackgroundTrackers(names, told, lost), last=last)
