import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.offline
import pytest
import yaml

from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.files import write_atomically
from fp8rl.rl.record.history import Event, Session, append_entry
from fp8rl.rl.record.metrics_log import MetricsLog
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.report.report import write_report
from tests.support.paths import new_run

ZERO = "mismatch/tis_clipfrac mismatch/k1_kl mismatch/nonfinite_count sync/mismatched_tensors".split()
PREFIX = "mismatch/train_rollout_logprob_abs_diff"
SPEC = {"run": {"name": "demo"}, "data": {"train": "<b>data</b>.jsonl"}}


def step_metrics(step: int, largest: float = 0.0) -> dict[str, float]:
    found = {"rollout/reward_mean": 0.25 * step, f"{PREFIX}_mean": largest / 10, f"{PREFIX}_p99": largest / 2}
    found |= {f"{PREFIX}_max": largest, "mismatch/exact_frac": 1.0 if largest == 0 else 0.5, "mismatch/tokens": 50}
    found |= {"sync/bytes": 3 * 2**20, "sync/seconds": 0.25, "sync/verified_tensors": 12}
    times = {"perf/step_seconds": 3.0, "perf/rollout_seconds": 1.5, "perf/train_seconds": 1.0}
    return found | times | dict.fromkeys(ZERO, 0.0)


def make_run(base: Path, rows: dict[int, dict[str, float]], samples: dict[int, list[Any]] | None = None) -> RunDir:
    run = new_run(base / "demo")
    run.experiment.write_text(yaml.safe_dump(SPEC))
    log = MetricsLog(run.metrics, last=-1)
    for step, metrics in rows.items():
        log.append(step, metrics)
    log.close()
    for step, values in (samples or {}).items():
        write_atomically(run.rollouts(step), "".join(json.dumps(value) + "\n" for value in values))
    return run


def sample(text: str, group: int = 0) -> dict[str, Any]:
    record = {"prompt": "2+2=?", "text": text, "reward": 1.0, "abs_diff_mean": 0.0, "group": group, "seed": 1}
    tokens = {"prompt_ids": [1], "token_ids": [2], "weight_versions": [0], "rollout_logprobs": [-1.0]}
    return record | tokens | {"finished": True, "advantage": 0.0, "train_logprobs": [-1.0]}


def page_of(run: RunDir) -> str:
    """The report without the plotly library inside it."""
    path, damage = write_report(run.path)
    assert damage == []
    assert path == run.report
    page = path.read_text(encoding="utf-8")
    library = plotly.offline.get_plotlyjs()
    assert library in page, "the library must be inlined"
    return page.replace(library, "")


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    data = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert "<" not in data[1], "a script element must not see markup in its JSON"
    charts = json.loads(data[1])
    assert len(charts) == len(re.findall(r'id="chart-\d+"', page))
    return {chart["title"]: chart for chart in charts}


def test_the_headline_says_what_happened(tmp_path: Path) -> None:
    rows = {0: {"eval/accuracy": 0.25}, 1: step_metrics(1), 2: step_metrics(2) | {"eval/accuracy": 0.9}}
    rows[0]["eval/problems"] = rows[2]["eval/problems"] = 100
    page = page_of(make_run(tmp_path, rows))
    assert "Held-out accuracy rose from 0.250 to 0.900 in 2 steps on 100 problems" in page
    assert "d = 0 on all 100 tokens of the trainer&#39;s version in 2 steps" in page
    assert "All 2 weight syncs verified" in page
    assert "all 100 tokens of the trainer&#39;s version exact" in page
    rows[2] |= {"mismatch/nonfinite_count": 1.0, "sync/mismatched_tensors": 2.0}
    wrong = page_of(make_run(tmp_path / "wrong", rows))
    for label in ("Largest mismatch |d|", "Weight syncs verified"):
        tones = [
            re.search(rf'tile (\w+)">\s*<div class="label">{re.escape(label)}<', each)[1] for each in (page, wrong)
        ]
        assert tones == ["good", "bad"]


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, {1: step_metrics(1)}))
    assert not re.findall(r"https?://|\bsrc=|\bhref=|@import|url\(", page)


def test_curves_hold_the_logged_numbers(tmp_path: Path) -> None:
    charts = charts_of(page_of(make_run(tmp_path, {1: step_metrics(1, 0.5), 2: step_metrics(2)})))
    (reward,) = charts["Reward"]["traces"]
    assert (reward["x"], reward["y"]) == ([1, 2], [0.25, 0.5])
    assert charts["Bytes sent"]["traces"][0]["y"] == [3.0, 3.0]
    assert charts["Bytes sent"]["y"]["title"] == "MiB"
    stack = {trace["name"]: trace["y"][0] for trace in charts["Time per step"]["traces"]}
    assert stack == {"rollout": 1.5, "train": 1.0, "sync": 0.25, "other": 0.25}
    assert "Held-out accuracy" not in charts and "Entropy" not in charts
    mismatch = charts["Mismatch |d|"]
    assert mismatch["traces"][2]["y"] == [0.5, 0.0] and mismatch["y"]["type"] == "log"


def test_text_of_the_model_cannot_become_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path, {1: step_metrics(1)}, {1: [sample("</script><script>alert(1)</script>")]})
    page = page_of(run)
    assert "<script>alert(1)" not in page
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page
    assert "&lt;b&gt;data&lt;/b&gt;.jsonl" in page


def test_answers_are_spread_out_and_the_first_of_each_prompt_is_shown(tmp_path: Path) -> None:
    values = [
        sample(f"answer {index}", group=index // 2)
        | {"reward": float(index % 3 > 0), "token_ids": [1] * (1 + 7 * index % 11)}
        for index in range(40)
    ]
    page = page_of(make_run(tmp_path, {1: step_metrics(1)}, {1: values, 2: values[:2]}))
    charts = charts_of(page)
    lengths, rewards = (charts[name]["series"] for name in ("Answer lengths", "Rewards by group"))
    assert [series["name"] for series in lengths] == ["step 1", "step 2"]
    assert lengths[0]["x"] == [len(value["token_ids"]) for value in values]
    assert rewards[0]["x"][:4] == [0.5, 0.5, 1.0, 0.5] and len(rewards[0]["x"]) == 20
    rows = re.findall(r'<td class="text">2\+2=\?</td><td class="text">answer (\d+)<', page)
    assert [int(index) for index in rows] == [*range(0, 16, 2), 0], "the first of each of the first prompts"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found no spec\.yaml"):
        write_report(tmp_path)
    run = make_run(tmp_path, {})
    with pytest.raises(UserError, match="found no row"):
        write_report(run.path)
    assert not run.report.exists()


def test_interventions_are_listed_with_their_capsules(tmp_path: Path) -> None:
    run = make_run(tmp_path, {1: step_metrics(1)})
    assert "Interventions" not in page_of(run)
    append_entry(run.events, Event(1, "tracking/resumed", 1.0, "above 0", "resume", None, "resumed after step 1"))
    append_entry(run.events, Event(1, "train/loss", None, "not finite", "skip_step", "capsules/step_1", "because <b>"))
    assert "fp8rl explain" not in page_of(run), "a run keeps only some of its capsules"
    run.capsule(1).mkdir(parents=True)
    page = page_of(run)
    assert "1 intervention, 0 steps not trained on. The first, step 1: because &lt;b&gt;." in page
    assert f"fp8rl explain {run.path}/capsules/step_1" in page


def test_a_run_that_ended_early_says_so_and_where_it_ran(tmp_path: Path) -> None:
    run = make_run(tmp_path, {step: step_metrics(step) for step in (1, 2)})
    run.experiment.write_text(yaml.safe_dump({**SPEC, "run": {"name": "demo", "steps": 9}}))
    page, _ = write_report(run.path)
    assert "The run is at step 2 of 9: it is still running, or was killed." in page.read_text()
    session = Session(1e9, "node: 2 cores of a CPU, 24 GiB", {"python": "3.11", "sglang": "0.5"}, "abc123+")
    append_entry(run.sessions, replace(session, notes=["3 of the 8 problems of data.eval are trained on as well"]))
    assert "Note: 3 of the 8 problems of data.eval are trained on as well." in write_report(run.path)[0].read_text()
    append_entry(run.sessions, replace(session, ended=1e9 + 75.4, why="train/loss: a gate"))
    text = write_report(run.path)[0].read_text()
    assert "The run ended after step 2 of 9: train/loss: a gate." in text
    for fact in ("node: 2 cores of a CPU, 24 GiB", "python 3.11, sglang 0.5", "abc123+", "wall time 75 s"):
        assert fact in text
    run.experiment.write_text(yaml.safe_dump({**SPEC, "run": {"name": "demo", "steps": 2}}))
    assert "It ended" not in write_report(run.path)[0].read_text()
    _, *others = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(["junk\n", *others]))
    assert "It ended" not in write_report(run.path)[0].read_text(), "a damaged line is no missing step"


def test_samples_stand_beside_their_reference_and_the_parts_of_their_reward(tmp_path: Path) -> None:
    values = sample("4") | {"reward_parts": {"right": 1.0, "short": -0.25}}
    run = make_run(tmp_path, {1: step_metrics(1)}, {1: [values]})
    assert "<th>Reference</th>" not in page_of(run), "older runs have not kept it"
    page = page_of(make_run(tmp_path / "new", {1: step_metrics(1)}, {1: [values | {"reference": "<#### 4>"}]}))
    assert re.search(r"<td class=\"text\">&lt;#### 4&gt;</td>\s*<td class=\"n\">1<br>.*right 1.*short -0.25", page)
