from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fp8rl.rl.run.lifecycle.folder import Folder


@pytest.mark.parametrize("how", ["deleted", "renamed", "replaced"])
def test_a_directory_that_goes_away_under_a_run_is_said_before_the_next_step(tmp_path: Path, how: str) -> None:
    path = tmp_path / "it"
    path.mkdir()
    folder = Folder(path)
    folder.check(1)
    path.rename(tmp_path / "elsewhere")
    if how == "deleted":
        shutil.rmtree(tmp_path / "elsewhere")
    if how == "replaced":
        path.mkdir()
    with pytest.raises(FileNotFoundError, match=r"run\.dir: found .*/it deleted or renamed before step 2"):
        folder.check(2)
