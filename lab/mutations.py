"""Slips planted in product code, one at a time, each of which the tests must catch.

`python -m lab.mutations [NAME ...]` copies the checkout, and for each row of `mutations.yaml` changes one piece of one
file in the copy and runs the tests that the row names. A row is caught if a test fails; the exit status is 1 if one is
not. The tests must pass before anything is planted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
_TESTS_FAILED = 1
"""Exit status of pytest; another one than this or 0 says that the tests could not run."""


@dataclass(frozen=True)
class Mutation:
    """A slip in one file."""

    name: str
    area: str
    file: str
    find: str
    """A piece of the file, which is there once."""
    replace: str
    """What stands in its place."""
    tests: list[str]
    """Files of tests that must catch it."""

    def planted(self, text: str) -> str:
        """Return the file's text with the slip. Raises ValueError: the piece is not there once."""
        if text.count(self.find) != 1:
            raise ValueError(f"{self.name}: found its piece {text.count(self.find)} times in {self.file}, expected 1")
        return text.replace(self.find, self.replace)


def mutations() -> list[Mutation]:
    return [Mutation(**row) for row in yaml.safe_load(TABLE.read_text())]


def copy_checkout(folder: Path) -> None:
    """Copy what git tracks, as it lies in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)  # the top has links into fp8rl/


def run_tests(checkout: Path, tests: list[str]) -> bool:
    """Run tests of a copy; whether they pass. Raises RuntimeError: they could not run."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, _TESTS_FAILED):
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return done.returncode == 0


def main() -> int:
    table = mutations()
    parser = argparse.ArgumentParser(prog="python -m lab.mutations")
    names = [mutation.name for mutation in table]
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *names], help=f"one of {', '.join(names)}")
    asked = parser.parse_args().names
    survived, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fp8rl-mutations-") as folder:
        checkout = Path(folder)
        copy_checkout(checkout)
        chosen = [mutation for mutation in table if not asked or mutation.name in asked]
        every = sorted({test for mutation in chosen for test in mutation.tests})
        if not run_tests(checkout, every):
            raise RuntimeError(f"pytest {' '.join(every)}: found failures, expected none before anything is planted")
        print(f"{time.monotonic() - began:5.0f} s  the tests pass before anything is planted", flush=True)
        for mutation in chosen:
            path = checkout / mutation.file
            text = path.read_text()
            path.write_text(mutation.planted(text))
            caught = not run_tests(checkout, mutation.tests)
            path.write_text(text)
            survived += [] if caught else [mutation.name]
            print(
                f"{time.monotonic() - began:5.0f} s  {'caught' if caught else 'SURVIVED'}  {mutation.name}", flush=True
            )
    print(f"{len(chosen) - len(survived)} of {len(chosen)} caught")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
