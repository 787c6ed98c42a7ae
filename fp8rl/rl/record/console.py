"""The console of a run: one line per step, and on a terminal a live table below. log.txt has the console's lines, the
driver's warnings, and the traceback of the error that ended a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fp8rl.numerics.core.errors import printable
from fp8rl.rl.record.metrics import SHOWN_FIRST, held_out_is, metric


class PlainConsole(Console):
    """A console that shows texts unchanged, also in tables: no markup, no `:names:` of emoji, no automatic colours. It
    leaves out characters that control a terminal."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of an object without control characters; rich calls this for nested objects too.

        Characters that are left out have no width in rich's tables either.
        """
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(printable(piece.text, ""), piece.style)


class StepConsole:
    """Prints steps as they complete. Without a terminal, as in the logs of a Ray job, it prints only plain lines. On a
    terminal, a table below the lines compares the last step with earlier ones, and bars show the progress.

    Args:
        steps: number of steps of the whole run.
        done: steps already completed when the run starts, after a resume.
        console: where to print; standard output by default.
        limit: the limit of an answer's tokens, as `rollout.max_new_tokens=20`.
    """

    def __init__(self, steps: int, *, done: int = 0, console: Console | None = None, limit: str = "") -> None:
        self._steps, self._limit = steps, limit
        self._console = console or PlainConsole()
        self._rows: dict[int, Mapping[str, float]] = {}
        counts = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
        self._groups = Progress(*counts, TimeElapsedColumn(), console=self._console)
        self._within = self._groups.add_task("groups", total=None)
        self._whole = Progress(
            *counts, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self._console
        )
        self._task = self._whole.add_task("steps ", total=steps, completed=done)
        live = Live(get_renderable=self._view, console=self._console, transient=True)
        self._live: AbstractContextManager[object] = live if self._console.is_terminal else nullcontext()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step, and move table and bar."""
        self._rows = {n: row for n, row in self._rows.items() if n > step - _BACK or n == min(self._rows)}
        self._rows[step] = dict(metrics)
        self._print(step_line(step, self._steps, metrics, self._limit))
        self._whole.update(self._task, completed=step)

    def progress(self, done: int, wanted: int) -> None:
        """Show that `done` of the `wanted` groups of a step, or of an evaluation, are answered."""
        if done < self._groups.tasks[0].completed:
            self._groups.reset(self._within)
        self._groups.update(self._within, completed=done, total=wanted)

    def note(self, text: str, style: str = "") -> None:
        """Print a line between the steps, e.g. that the engine is ready or that a gate fired."""
        self._print(Text(text, style=style))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)
        self._console.file.flush()
        CONSOLE.info(printable(text.plain))

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def _view(self) -> RenderableType:
        bars = (self._groups, self._whole) if self._groups.tasks[0].total is not None else (self._whole,)
        return Group(*([steps_table(self._rows)] if self._rows else []), *bars)


def steps_table(rows: Mapping[int, Mapping[str, float]]) -> Table:
    """Make a table of the numbers in a step's line: a row for each number, columns for the first and the last steps.

    rows: the metrics of each step, in rising order of steps.
    """
    shown = [step for step in rows if step == min(rows) or step > max(rows) - _SHOWN]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", style="dim")
    for step in shown:
        table.add_column(str(step), justify="right")
    for name, label in SHOWN_FIRST.items():
        if any(name in rows[step] for step in shown):
            cells = [_written(name, rows[step][name]) if name in rows[step] else Text("") for step in shown]
            table.add_row(_label(label, *rows.values()), *cells)
    return table


def _label(label: str, *rows: Mapping[str, float]) -> str:
    return "held-out reward" if label == "accuracy" and held_out_is(*rows) == "reward" else label


_SHOWN = 5
"""How many newest steps the table has, in addition to the first one."""
_BACK = 2 * _SHOWN


def step_line(step: int, steps: int, metrics: Mapping[str, float], limit: str = "") -> Text:
    """Return the line `step  3/60  reward 0.412  max|d| 0  exact 1  ...` without metrics that the step lacks.

    limit: the limit of an answer's tokens, which the line names if it has ended most answers.
    """
    line = Text(f"step {step:>{len(str(steps))}}/{steps}", style="bold")
    for name, label in SHOWN_FIRST.items():
        if name not in metrics or (label == "loss" and "rollout/reward_mean" in metrics):
            continue
        line.append(f"  {_label(label, metrics)} ", style="dim not bold")
        line.append(_written(name, metrics[name]))
        if label == "exact" and "drift/tokens" in metrics:
            line.append(_compared(metrics))
    if "critic/lr" in metrics and "train/lr" not in metrics and not metrics.get("gates/withheld"):
        line.append("  the critic learns alone", style="not bold")
    if metrics.get("mismatch/nonfinite_count"):
        line.append(f"  non-finite {metrics['mismatch/nonfinite_count']:.0f}", style="bold red")
    if metrics.get("gates/withheld"):
        line.append("  not trained on", style="bold yellow")
    finished, answers = (metrics.get(f"rollout/{name}") for name in ("finished_fraction", "trajectories"))
    if limit and answers and finished is not None and finished < 0.5:
        line.append(f"  {no_room((1.0 - finished) * answers, answers, limit)}", style="bold yellow")
    if metrics.get("sync/mismatched_tensors"):
        line.append(f"  mismatched tensors {metrics['sync/mismatched_tensors']:.0f}", style="bold red")
    return line


def no_room(cut: float, answers: float, limit: str) -> str:
    """Return the sentence that `limit` has ended `cut` of the `answers`."""
    return f"{cut:.0f} of {answers:.0f} answers had no room left ({limit})"


def _compared(metrics: Mapping[str, float]) -> Text:
    """Return how many tokens were compared, and how far the trained tokens of older weights have drifted."""
    mean, largest = (metrics[f"drift/logprob_abs_diff_{name}"] for name in ("mean", "max"))
    older = (
        f"{metrics['drift/tokens']:,.0f} older drifted {format_difference(mean)}, at most {format_difference(largest)}"
    )
    return Text(f" of {metrics['mismatch/tokens']:,.0f} tokens, {older}", style="dim not bold")


def format_difference(value: float) -> str:
    """Format abs(d); `0` means an exact zero and nothing else."""
    return "0" if value == 0 else f"{value:.2e}"


def format_fraction(value: float) -> str:
    """Format a fraction with four digits, truncated and not rounded, so that `1` means all."""
    return f"{value:.0f}" if value in (0.0, 1.0) else f"{math.floor(value * 1e4) / 1e4:.4f}"


def format_percent(value: float) -> str:
    """Format a percentage like `99.99%`, truncated and not rounded, so that `100.00%` means all."""
    return f"{math.floor(value * 1e4) / 1e2:.2f}%"


def _written(name: str, value: float) -> Text:
    """Return a number of a step's line: green if it has the value that it should have, yellow if not."""
    if name == "mismatch/train_rollout_logprob_abs_diff_max":
        return Text(format_difference(value), style=f"{'yellow' if value else 'green'} not bold")
    if name == "mismatch/exact_frac":
        return Text(format_fraction(value), style=f"{'green' if value == 1.0 else 'yellow'} not bold")
    return Text(f"{value:.2f}s" if metric(name).unit == "s" else f"{value:.3f}", style="not bold")


CONSOLE = logging.getLogger("fp8rl.console")
"""The logger to which the console repeats its lines."""


class _QuietFile(logging.FileHandler):
    """A log file that ignores its own write errors, such as a full disk: the error that ends the run reports it."""

    def handleError(self, record: logging.LogRecord) -> None: ...


@contextmanager
def run_log(path: Path) -> Iterator[None]:
    """Append to `path` inside the block: console lines, and warnings and errors of all libraries."""
    handler = _QuietFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    CONSOLE.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    except KeyboardInterrupt:
        CONSOLE.info("interrupted")
        raise
    except Exception:
        CONSOLE.exception("the run failed")
        raise
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        with suppress(OSError):  # of what a full disk has not taken
            handler.close()
