"""A run in wandb, which may be lost on the way without ending the run.

wandb is imported where it is used: a process that imports it and is killed leaves folders behind, and trainer ranks
import this package.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.files import write_atomically
from fp8rl.numerics.core.section import Section
from fp8rl.rl.record.metrics import METRICS
from fp8rl.rl.record.run_dir import RunDir

if TYPE_CHECKING:
    import wandb

# A process beside a run that uploads it to wandb, so that no step ever waits for a server.
#
# The run records offline, into a file; `wandb beta sync --live` sends what the file holds and what is added to it, up
# to the record that ends the run. A server that stalls or dies holds up this process alone, and the file is whole.

_SERVICE = "WANDB_SERVICE"
"""The variable by which the process would use, and end with, the wandb process of the run."""


class Upload:
    """The upload of the run's file in `folder`; what wandb says of it is written to `log`.

    It ends with this process.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self._log = folder, log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fp8rl.rl.record.wandb_run", str(folder)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in os.environ.items() if name != _SERVICE},
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        """True if it is over, well or not."""
        return self._process.poll() is not None

    def finish(self, seconds: float) -> bool:
        """Wait for the last of it, as long as that; then end it. Whether all is uploaded."""
        try:
            done = self._process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            done = False
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # one that is stopped does not see the end of its lifeline
        self._process.wait()
        return done

    @property
    def remedy(self) -> str:
        """The last words of wandb, and what sends the rest."""
        lines = self._log.read_text(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return f"{last.strip()}; see {self._log}). The run's file is whole: `wandb sync {self.folder}` sends it"


def main() -> None:
    """The process's main function. Standard input is its lifeline: once its owner closes it, or dies in whatever
    way, it is killed, and wandb's own process with it, which looks after its parent."""
    threading.Thread(target=_die_with_owner, name="lifeline", daemon=True).start()
    from wandb.cli.cli import cli

    cli(["beta", "sync", "--live", "--yes", sys.argv[1]])


def _die_with_owner() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()

METRIC_GROUPS = tuple(dict.fromkeys(name.partition("/")[0] for name in METRICS))

SUMMARIES = {name: row.summary for name, row in METRICS.items() if row.summary}

BASICS = {
    "reward": "rollout/reward_mean",
    "accuracy": "eval/accuracy",
    "max_abs_d": "mismatch/train_rollout_logprob_abs_diff_max",
    "exact_fraction": "mismatch/exact_frac",
    "mismatched_tensors": "sync/mismatched_tensors",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "answer_tokens": "rollout/response_tokens_mean",
    "step_seconds": "perf/step_seconds",
}
"""Metrics that wandb gets a second time as `basics/NAME`: its pages and `wandb leet` show groups by the alphabet, so
that these come first, on one screen."""

_FINISH_SECONDS = 120.0
"""Seconds for what is not uploaded yet at the end."""
_DATA_DIR = "WANDB_DATA_DIR"
_WEAVE = "WANDB_DISABLE_WEAVE"
_KEY = "tracking.wandb"


class WandbSection(Section):
    """The `tracking.wandb:` section of an experiment."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """`offline` records into the run's directory. `online` does so too, and a process beside the run uploads the file.
    `disabled`: nothing."""
    project: str = Field(default="fp8rl", min_length=1)
    """The project of wandb that the run belongs to."""


def check_wandb(config: WandbSection) -> None:
    """Check that wandb takes the project's name and, online, knows who is there. Asks no server.

    Raises:
        UserError: it does not.
    """
    import wandb

    try:
        wandb.Settings(project=config.project)
    except wandb.Error as error:
        raise user_error(
            f"{_KEY}.project", found=config.project, expected=f"a name that wandb takes ({error})", remedy="Correct it."
        ) from error
    if config.mode != "online":
        return
    try:
        known, why = wandb.login(prompt=False, verify=False), "no key"
    except wandb.Error as error:
        known, why = False, str(error)
    if not known:
        raise user_error(
            f"{_KEY}.mode",
            found=f"online with {why}",
            expected="a key of a wandb account",
            remedy=f"Run `wandb login`, set WANDB_API_KEY, or set {_KEY}.mode=offline.",
        )


def leet(run: RunDir, *command: str) -> str | None:
    """The command that shows a run's offline record in a terminal; None where there is none.

    It is `wandb` as this shell finds it: `make demo` runs in an environment that is not activated.
    """
    offline = run.path / "wandb" / "latest-run"
    wandb = "wandb" if shutil.which("wandb") else os.path.relpath(Path(sys.executable).with_name("wandb"))
    return " ".join([wandb, "leet", *command, str(offline)]) if offline.exists() else None


class WandbRun:
    """A started run. The first call that fails loses it: `lost` is told once, and further calls do nothing. Online,
    `lost` is told too when the upload has ended; the file is then written on.

    Args:
        run: the run's directory, already created.
        experiment: resolved, as plain values.
        resumed: go on with the curves of an earlier start.
        lost: told the sentence that says so; an attribute, which may be replaced.

    Raises:
        UserError: wandb does not start.
    """

    def __init__(
        self,
        run: RunDir,
        experiment: Mapping[str, Any],
        config: WandbSection,
        *,
        resumed: bool,
        lost: Callable[[str], object],
    ) -> None:
        self.lost = lost
        self._sets_data_dir = _DATA_DIR not in os.environ
        if self._sets_data_dir:  # wandb would stage its tables in the user's home
            os.environ[_DATA_DIR] = str(run.path / "wandb" / "data")
        self._upload: Upload | None = None
        self._run: wandb.Run | None = None
        try:
            self._run = _start(run, experiment, config, resumed)
            if config.mode == "online":
                self._upload = Upload(Path(self._run.dir).parent, run.path / "wandb" / "upload.log")
        except BaseException:
            self._restore()
            raise
        self._upload_lost = False

    @property
    def is_lost(self) -> bool:
        """True if it is not recorded, or not uploaded, any more."""
        return self._run is None or self._upload_lost

    def log(self, row: Mapping[str, Any]) -> None:
        self._send(lambda run: _log(run, row))
        if self._upload is not None and self._upload.ended and not self._upload_lost:
            self._lose_upload(self._upload)

    def alert(self, title: str, text: str) -> None:
        """Tell wandb what somebody should look at."""
        self._send(lambda run: run.alert(title=title, text=text))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close it, with values for wandb's summary of the run. A second call does nothing."""
        import wandb

        def close(run: wandb.Run) -> None:
            run.summary.update(dict(summary))
            run.finish(exit_code=exit_code)
            wandb.teardown(exit_code)  # ends wandb's process now, where a failure can be handled

        self._send(close)
        self._run = None
        self._restore()
        upload, self._upload = self._upload, None
        if upload is not None and not upload.finish(_FINISH_SECONDS) and not self._upload_lost:
            self._lose_upload(upload)

    def _lose_upload(self, upload: Upload) -> None:
        self._upload_lost = True
        self.lost(f"the upload to wandb has ended ({upload.remedy}")

    def _restore(self) -> None:
        if self._sets_data_dir:
            os.environ.pop(_DATA_DIR, None)

    def _send(self, use: Callable[[wandb.Run], object]) -> None:
        """Its process may die, its server go away: training does not depend on either."""
        import wandb

        if self._run is None:
            return
        try:
            use(self._run)
        except Exception as error:
            self._run = None
            with suppress(Exception):
                wandb.teardown(1)  # forgets the dead process, so that wandb could be started again
            self.lost(f"wandb is lost ({type(error).__name__}: {error}); metrics.jsonl and the report are kept")


def table(columns: list[str], rows: list[list[Any]]) -> wandb.Table:
    import wandb

    return wandb.Table(columns=columns, data=rows)


def _log(run: wandb.Run, row: Mapping[str, Any]) -> None:
    """Log a row, and remove its tables' temporary files: wandb has copied them, and keeps those of 100 tables."""
    run.log({**row, **{f"basics/{short}": row[name] for short, name in BASICS.items() if name in row}})
    for value in row.values():
        target = getattr(value, "_artifact_target", None)
        if target is not None:
            target.artifact._tmp_dir.cleanup()


@contextmanager
def _no_weave_advert() -> Iterator[None]:
    """Keep wandb from advertising Weave in a process that has imported a client of OpenAI's and not Weave itself."""
    quiet = _WEAVE not in os.environ and "weave" not in sys.modules
    if quiet:
        os.environ[_WEAVE] = "true"
    try:
        yield
    finally:
        if quiet:
            os.environ.pop(_WEAVE, None)


@_no_weave_advert()
def _start(run: RunDir, experiment: Mapping[str, Any], config: WandbSection, resumed: bool) -> wandb.Run:
    import wandb

    number = run.path / "wandb" / "run_id"  # one for a directory, so that a resumed run continues the same curves
    if not number.is_file():
        write_atomically(number, uuid.uuid4().hex[:8])
    try:
        started = wandb.init(
            mode="disabled" if config.mode == "disabled" else "offline",
            project=config.project,
            name=run.name,
            id=number.read_text().strip(),
            resume="allow" if resumed else None,  # for whoever uploads the file
            dir=run.path,
            config=dict(experiment),
            # The console stays ours: wandb would wrap stdout and print its own summary between the lines of the run.
            settings=wandb.Settings(console="off", silent=True),
        )
    except wandb.Error as error:
        raise UserError(f"{_KEY}: found {error}, expected that wandb starts. Set {_KEY}.mode=offline.") from error
    started.define_metric("step", hidden=True)
    for group in ("basics", *METRIC_GROUPS):
        started.define_metric(f"{group}/*", step_metric="step")
    basics = {f"basics/{short}": SUMMARIES[name] for short, name in BASICS.items() if name in SUMMARIES}
    for name, summary in (SUMMARIES | basics).items():
        started.define_metric(name, step_metric="step", summary=summary)
    return started
