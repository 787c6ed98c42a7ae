"""Whether a run's directory is still there: what is recorded elsewhere is lost."""

from __future__ import annotations

import os
from pathlib import Path


class Folder:
    """A directory as it was when this was made."""

    def __init__(self, path: Path) -> None:
        self._path, self._made = path, path.stat()

    def check(self, step: int) -> None:
        """Raise FileNotFoundError if it was deleted, renamed or replaced before this step."""
        try:
            same = os.path.samestat(self._made, self._path.stat())
        except FileNotFoundError:
            same = False
        if not same:
            raise FileNotFoundError(
                f"run.dir: found {self._path} deleted or renamed before step {step}, expected it to stay where it is "
                "as long as the run lasts. What was trained since its last checkpoint is lost"
            )
