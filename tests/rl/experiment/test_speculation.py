"""`rollout.speculation`: what it says, and where it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment.reference import schema
from fp8rl.rl.experiment.validation import parse_experiment, valid_keys
from fp8rl.rollout.config import SpeculationSection, check_drafts
from tests.support.experiments import experiment

DRAFTS = {"drafts": 3}


def test_a_spec_says_it_as_it_is_written_again() -> None:
    asked = experiment(rollout={"speculation": {"drafts": 3, "from": "siblings"}})
    assert asked.rollout.speculation == SpeculationSection.model_validate({"drafts": 3, "from": "siblings"})
    written = asked.to_dict()
    assert written["rollout"]["speculation"] == {"drafts": 3, "from": "siblings"}
    assert parse_experiment(written) == asked
    assert "rollout.speculation.from" in valid_keys()
    section = schema()["$defs"]["SpeculationSection"]
    assert section["properties"]["from"]["description"].startswith("The source of drafts")


def test_a_row_has_room_for_drafts_in_the_cache_behind_it() -> None:
    asked = experiment(rollout={"speculation": DRAFTS, "context_length": 1024}).rollout
    assert asked.row_tokens == 1024 + 2 * 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": {"speculation": {"drafts": 0}}}, r"rollout.speculation.drafts: found 0, expected .* 1"),
        ({"rollout": {"speculation": {"from": "teacher"}}}, r"rollout.speculation.from: found 'teacher'"),
        ({"rollout": {"speculation": {"source": "history"}}}, r"rollout.speculation.source.*[Uu]nknown"),
    ],
)
def test_what_cannot_be_had_is_refused(changes: Any, said: str) -> None:
    rollout = {"speculation": DRAFTS} | changes.get("rollout", {})
    with pytest.raises(UserError, match=said):
        experiment(**{**changes, "rollout": rollout})


def test_top_p_without_old_weights_is_not_refused() -> None:
    assert experiment(rollout={"speculation": DRAFTS, "top_p": 0.9}).rollout.speculation is not None


def test_a_gpu_is_refused() -> None:
    check_drafts(SpeculationSection(), cuda=False)
    check_drafts(None, cuda=True)
    with pytest.raises(UserError, match="rollout.speculation: found 'drafts=4 on a GPU', expected null"):
        check_drafts(SpeculationSection(), cuda=True)
