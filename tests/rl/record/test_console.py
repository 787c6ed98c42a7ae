import io
import re
import time

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8rl.rl.record.console import PlainConsole, StepConsole, format_fraction, step_line, steps_table

AGREES = {"train_rollout_logprob_abs_diff_max": 0.0, "exact_frac": 1.0, "nonfinite_count": 0.0}
TIMES = {"perf/rollout_seconds": 1.234, "perf/train_seconds": 0.5, "sync/seconds": 0.02, "sync/mismatched_tensors": 0.0}
METRICS = {f"mismatch/{name}": value for name, value in AGREES.items()} | TIMES
METRICS |= {"rollout/reward_mean": 0.4321, "train/loss": -0.01, "train/grad_norm": 0.987}


DRIFT = {"drift/tokens": 3829.0, "drift/logprob_abs_diff_mean": 0.02, "drift/logprob_abs_diff_max": 3.1}
CUT = {"rollout/finished_fraction": 0.25, "rollout/trajectories": 4.0}
LIMIT = "rollout.max_new_tokens=200"


@pytest.mark.parametrize(
    ("more", "said", "unsaid"),
    [
        ({}, "reward 0.432  grad 0.987  max|d| 0  exact 1  rollout 1.23s  train 0.50s  sync 0.02s", "accuracy"),
        ({"eval/accuracy": 0.925, "mismatch/nonfinite_count": 2.0}, "0.02s  accuracy 0.925  non-finite 2", "tensors"),
        ({"sync/mismatched_tensors": 1.0}, "mismatched tensors 1", "non-finite"),
        ({"mismatch/tokens": 16.0, **DRIFT}, "of 16 tokens, 3,829 older drifted 2.00e-02, at most 3.10", "accuracy"),
        ({"critic/lr": 1e-5}, "the critic learns alone", "accuracy"),
        ({"critic/lr": 1e-5, "train/lr": 1e-4}, "step  1/60", "alone"),
        ({"critic/lr": 1e-5, "gates/withheld": 1.0}, "step  1/60", "alone"),
        (CUT, f"  3 of 4 answers had no room left ({LIMIT})", "accuracy"),
        (CUT | {"rollout/finished_fraction": 0.5}, "step  1/60", "room"),
    ],
)
def test_a_step_is_one_line_with_what_it_has(more: dict[str, float], said: str, unsaid: str) -> None:
    line = step_line(1, 60, METRICS | more, LIMIT).plain
    assert said in line and unsaid not in line and "\n" not in line


def test_only_exact_agreement_reads_as_exact_and_without_reward_the_loss_is_shown() -> None:
    assert [format_fraction(value) for value in (1.0, 0.999999, 0.0)] == ["1", "0.9999", "0"]
    assert step_line(1, 9, {"train/loss": 2.5, "train/grad_norm": 1.0}).plain == "step 1/9  loss 2.500  grad 1.000"


def test_without_a_terminal_lines_are_plain_whole_and_without_a_bar() -> None:
    output = io.StringIO()
    with StepConsole(2, console=Console(file=output, width=40)) as console:
        console.note("engine ready [1/1]")
        console.progress(3, 8)
        console.step(1, METRICS)
        console.step(2, METRICS)
    lines = output.getvalue().splitlines()
    assert lines == ["engine ready [1/1]", step_line(1, 2, METRICS).plain, step_line(2, 2, METRICS).plain]


@pytest.mark.slow
def test_a_terminal_shows_how_many_groups_of_the_step_are_answered() -> None:
    output = io.StringIO()
    terminal = Console(file=output, force_terminal=True, width=160, color_system=None)
    with StepConsole(4, console=terminal) as console:
        for done, wanted in ((3, 32), (32, 32), (1, 16)):
            console.progress(done, wanted)
            time.sleep(0.6)  # it is drawn four times a second
        console.step(1, METRICS)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    bars = [line for line in text.splitlines() if line.startswith("groups")]
    assert list(dict.fromkeys(bar.split()[-2] for bar in bars)) == ["3/32", "32/32", "1/16"]
    assert step_line(1, 4, METRICS).plain in text and "1/4" in text.replace(step_line(1, 4, METRICS).plain, "")


def test_the_table_has_the_first_step_and_the_newest() -> None:
    rows = {step: METRICS | {"rollout/reward_mean": step / 100} for step in (0, 10, 11, 12, 13, 14, 15)}
    rows[0] = {"eval/accuracy": 0.387}
    output = io.StringIO()
    Console(file=output, width=120).print(steps_table(rows))
    lines = [line.split() for line in output.getvalue().splitlines()]
    assert lines[1] == ["step", "0", "11", "12", "13", "14", "15"]
    assert ["reward", "0.110", "0.120", "0.130", "0.140", "0.150"] in lines
    assert ["accuracy", "0.387"] in lines
    assert not any("loss" in line for line in lines[2:3]), "reward comes first"


HOSTILE = "[/b] [link=file:///x]here[/link] [red]x :smile: {\x1b[31m\x1b]8;;http://x} \x9b2J"
SEEN = "[/b] [link=file:///x]here[/link] [red]x :smile: {[31m]8;;http://x} 2J"


@pytest.mark.parametrize("terminal", [False, True])
def test_texts_of_others_are_shown_and_never_obeyed(terminal: bool) -> None:
    """As a line, as a renderable, as a table's cell, heading and title, and in a note of a run."""
    output = io.StringIO()
    console = PlainConsole(file=output, width=200, force_terminal=terminal, color_system=None)
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    console.print(HOSTILE, Text(HOSTILE), table)
    steps = StepConsole(3, console=console)
    steps.note(HOSTILE, style="bold")
    steps.progress(1, 2)
    said = output.getvalue()
    assert said.count(SEEN) == 7 and "\x1b]8" not in said and "\x1b[31m" not in said
