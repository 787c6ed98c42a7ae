import dataclasses
from pathlib import Path

from fp8rl.rl.record.history import Event, append_event, cut_events, read_events

EVENTS = [
    Event(2, "mismatch/exact_frac", 0.5, "below 1.0", "resync", "capsules/step_2", "resync: ..."),
    Event(2, "train/loss", None, "not finite", "skip_step", None, "skip_step: ..."),
    Event(5, "gates/stale_resyncs", 1.0, "above 0", "resync", None, "é"),
]


def test_events_are_read_as_written_and_a_torn_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    for event in EVENTS:
        append_event(path, event)
    with path.open("a") as file:
        file.write('{"step": 6, "met')
    assert read_events(path) == EVENTS


def test_a_resumed_run_forgets_events_of_steps_that_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    cut_events(path, 3)
    assert not path.exists()
    for event in EVENTS:
        append_event(path, event)
    cut_events(path, 3)
    append_event(path, dataclasses.replace(EVENTS[2], step=4))
    assert [event.step for event in read_events(path)] == [2, 2, 4]
