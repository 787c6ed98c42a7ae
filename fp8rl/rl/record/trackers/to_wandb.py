"""A run in wandb, recorded into `wandb/` of its folder. wandb's own process writes the file, and uploads it online."""

from __future__ import annotations

import atexit
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.numerics.core.errors import typed, user_error
from fp8rl.numerics.core.files import write_atomically
from fp8rl.rl.record.metrics import METRICS, SHOWN_FIRST
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers import Tracked, Tracker, WandbSection

if TYPE_CHECKING:
    import wandb

    from fp8rl.rl.record.rollouts import RolloutRecord

METRIC_GROUPS = tuple(dict.fromkeys(name.partition("/")[0] for name in METRICS))

SUMMARIES = {name: row.summary for name, row in METRICS.items() if row.summary}

BASICS = {label.replace("|d|", "_abs_d"): name for name, label in SHOWN_FIRST.items()}
"""Metrics that wandb gets a second time as `basics/NAME`. wandb's pages and `wandb leet` sort groups by the alphabet,
so this group comes first, on one screen."""

_UPLOAD_SECONDS = 120.0
"""Seconds that wandb gets at the end of a run to upload the rest."""
_KEY = "tracking.wandb"


def check_wandb(config: WandbSection) -> None:
    """Check that wandb accepts the project's name and, online, has an API key. Asks no server. Raises UserError: the
    name is not accepted, or there is no key."""
    import wandb

    try:
        wandb.Settings(project=config.project)
    except wandb.Error as error:
        expected = f"a name that wandb takes ({error})"
        raise user_error(f"{_KEY}.project", config.project, expected, "Correct it.") from error
    if config.mode != "online":
        return
    try:
        known, why = wandb.login(prompt=False, verify=False), "no key"
    except wandb.Error as error:
        known, why = False, str(error)
    if not known:
        remedy = f"Run `wandb login`, set WANDB_API_KEY, or set {_KEY}.mode=offline."
        raise user_error(f"{_KEY}.mode", f"online with {why}", "a key of a wandb account", remedy)


def leet(run: RunDir, *command: str) -> str:
    """Return the command that shows a run's offline record in a terminal."""
    return " ".join([typed("wandb"), "leet", *command, str(latest(run))])


def latest(run: RunDir) -> Path:
    """The folder of the run's newest offline record."""
    return run.path / "wandb" / "latest-run"


class Wandb(Tracker):
    """Metrics in groups by the part before the slash, sample rollouts as tables, events as alerts."""

    @staticmethod
    def variables(run: Tracked) -> dict[str, str]:
        # The folder for its tables, which would be staged in the user's home, and what wandb sets when it starts.
        return {"WANDB_DATA_DIR": str(run.files.path / "wandb/data"), "WANDB_SERVICE": ""}

    def __init__(self, run: Tracked) -> None:
        self._tracked = run
        self._run = _start(run, run.place("wandb"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        basics = {f"basics/{short}": metrics[name] for short, name in BASICS.items() if name in metrics}
        row = {"step": step, **metrics, **basics}
        self._run.log(row, step=step, commit=not self._tracked.shows(step))  # the samples belong to the same row

    def show(self, step: int, records: Sequence[RolloutRecord]) -> None:
        import wandb

        columns = ["prompt", "conversation", "reward", "parts of it", "outcome", "mean abs d", "d by token"]
        table = wandb.Table(columns=columns)
        for record in records:
            turns = "\n".join(f"{by}: {text}" for by, text in record.said) or record.text
            pairs = zip(record.train_logprobs, record.rollout_logprobs, strict=True)
            by_token = " ".join(f"{train - rollout:.3g}" for train, rollout in pairs)
            parts, outcome = _listed(record.reward_parts), _listed(record.outcome)
            table.add_data(record.prompt, turns, record.reward, parts, outcome, record.abs_diff_mean, by_token)
        self._run.log({"step": step, "rollout/samples": table}, step=step)
        # wandb has copied the table's temporary files, and would keep the files of 100 tables.
        table._artifact_target.artifact._tmp_dir.cleanup()

    def alert(self, text: str) -> None:
        self._run.alert(title=f"{self._tracked.files.name}: {text.split(':')[0]}", text=text)

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        try:
            self._run.finish(exit_code=exit_code)
        except TimeoutError:
            folder = Path(self._run.dir).parent
            raise TimeoutError(
                f"not all is uploaded after {_UPLOAD_SECONDS:g} s; `wandb sync --no-skip-online {folder}` uploads it"
            ) from None


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in parts.items())


def _start(run: Tracked, place: Path) -> wandb.Run:
    import wandb

    number = place / "run_id"  # one for a directory, so that a resumed run continues the same curves
    if not run.resumed or not number.is_file():
        write_atomically(number, uuid.uuid4().hex[:8])
    started = wandb.init(
        mode="online" if run.wandb.mode == "online" else "offline",
        reinit="create_new",  # a script that trains may have a run of its own
        project=run.wandb.project,
        name=run.files.name,
        id=number.read_text().strip(),
        resume="allow" if run.resumed else None,
        dir=str(run.files.path),
        config=run.config,
        # Whoever watches reads the file: it is written every second, where wandb writes it every 15.
        settings=wandb.Settings(
            console="off",
            silent=True,
            x_transaction_log_flush_interval=1.0,
            finish_timeout=_UPLOAD_SECONDS,
            finish_timeout_raises=True,
        ),
    )
    atexit.unregister(_end_service)
    atexit.register(_end_service)  # registered after wandb's own, so it runs first
    started.define_metric("step", hidden=True)
    for group in ("basics", *METRIC_GROUPS):
        started.define_metric(f"{group}/*", step_metric="step")
    basics = {f"basics/{short}": SUMMARIES[name] for short, name in BASICS.items() if name in SUMMARIES}
    for name, summary in (SUMMARIES | basics).items():
        started.define_metric(name, step_metric="step", summary=summary)
    return started


def _end_service() -> None:
    """End wandb's process at the end of this process. It may be gone: `ray job stop` ends all processes of a job."""
    import wandb

    with suppress(Exception):
        wandb.teardown()
