import dataclasses
import importlib.metadata
import json
import time
from pathlib import Path

import psutil

from fp8rl.rl.record.history import append_session, sessions_found, this_session


def test_a_session_knows_machine_versions_and_code() -> None:
    session = this_session()
    assert abs(session.started - time.time()) < 60 and session.seconds is None
    assert session.versions["sglang"] == importlib.metadata.version("sglang")
    assert f"{psutil.virtual_memory().total / 2**30:.0f} GiB" in session.machine and "cores of" in session.machine


def test_a_line_that_a_power_cut_tore_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text('{"started": 1')
    session = this_session()
    append_session(path, session)
    found, bad = sessions_found(path)
    assert found == [session] and [line.number for line in bad] == [1]


def test_the_last_line_of_a_session_counts_and_a_killed_one_has_no_end(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    killed = this_session()
    whole = dataclasses.replace(killed, started=killed.started + 10)
    ended = dataclasses.replace(whole, ended=whole.started + 2.5, why="a gate")
    for session in (killed, whole, ended):
        append_session(path, session)
    with path.open("a") as file:
        file.write('{"started": "yesterday"}\n')
    found, bad = sessions_found(path)
    assert found == [killed, ended] and found[1].seconds == 2.5
    assert [line.number for line in bad] == [4]
    assert all("started" in json.loads(line) for line in path.read_text().splitlines())


def test_what_no_session_can_have_been_is_a_bad_line(tmp_path: Path) -> None:
    sound = dataclasses.asdict(this_session())
    wrong = ({"started": 1e300}, {"started": "now"}, {"ended": -1.0}, {"machine": 3}, {"versions": 1}, {"why": 2})
    lines = [json.dumps(sound | change) for change in wrong] + [json.dumps(sound)]
    (tmp_path / "sessions.jsonl").write_text("\n".join(lines) + "\n")
    found, bad = sessions_found(tmp_path / "sessions.jsonl")
    assert len(found) == 1 and [line.number for line in bad] == [1, 2, 3, 4, 5, 6]
