"""Where things lie in the repository."""

from pathlib import Path

from rl.record.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CONFIGS = ROOT / "diagnose/plan/configs"


def new_run(path: Path) -> RunDir:
    """The directory of a run that nobody works on."""
    path.mkdir(parents=True, exist_ok=True)
    return RunDir(path.absolute())
