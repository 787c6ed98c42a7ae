"""Trackers: their own files read back by their own packages, and what becomes of one that fails."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.record.trackers import TRACKERS, check_trackers
from tests.support.paths import new_run
from tests.support.tracked import tracking, unexpected

ROWS = {1: {"train/loss": 0.5, "eval/set/pass@2": 0.25}, 2: {"train/loss": 0.25}}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def followed(folder: Path, name: str, lost: Callable[[str], object] = unexpected) -> None:
    """Have a tracker follow a run of these rows to its end."""
    with tracking(new_run(folder), name, lost=lost) as tracker:
        for step, row in ROWS.items():
            tracker.log(step, row)


@needs("tensorboard")
def test_tensorboards_event_file_has_every_row_with_unit_and_meaning(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    followed(tmp_path, "tensorboard")
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    loss = [(event.step, event.tensor_proto.float_val[0]) for event in read.Tensors("train/loss")]
    assert loss == [(1, 0.5), (2, 0.25)]
    assert read.SummaryMetadata("train/loss").summary_description


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"tracking.to: found '{name}'.*pip install 'fp8rl\[{name}\]'"):
        check_trackers([name])


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_does_not_begin_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its package cannot be imported."""
    monkeypatch.setitem(sys.modules, name, None)
    said: list[str] = []
    followed(tmp_path, name, lost=said.append)
    (sentence,) = said
    assert sentence.startswith(f"{name} is lost: ModuleNotFoundError: ")
    assert "metrics.jsonl and the report are kept" in sentence
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
