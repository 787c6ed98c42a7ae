"""A process beside a run that uploads it to wandb, so that no record ever waits for a server.

The run is recorded offline, into a file; `wandb beta sync --live` sends what the file holds and what is added to it, up
to the record that ends the run. A server that stalls or dies holds up this process alone, and the file is whole.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

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
                [sys.executable, "-P", "-m", "fp8rl.rl.record.trackers.upload", str(folder)],
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
