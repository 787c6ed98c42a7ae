"""Rehearse both calls from their archives, in an empty folder and without a GPU: what it prints is the record.

    PYTHON lab/bench/gpu/fifteen/rehearse.py .fifteen [1 | 2 | cache]...

PYTHON is an environment of `image.txt`. The folder gets the tracked files that the calls need and nothing else of this
checkout; the scripts see no other package than the image's and the archives'.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

CHECKOUT = Path(__file__).parents[4]
sys.path.insert(0, str(CHECKOUT))
MOST_FILES, MOST_BYTES = 8, 16 << 20


def main() -> int:
    carried, told = Path(sys.argv[1]).resolve(), Told()
    wanted = sys.argv[2:] or ["1", "2", "cache"]
    told.say(f"# Rehearsal of the two calls, {datetime.now(UTC):%Y-%m-%d}: {', '.join(wanted)}\n")
    told.say("By `make rehearse-gpu`: no GPU, tiny sizes, kernels interpreted, SGLang's engine for CPUs. Seconds are")
    told.say(f"those of a busy machine of {os.cpu_count()} cores. Python {platform.python_version()}.")
    with tempfile.TemporaryDirectory(prefix="fifteen-") as folder:
        tree = checkout(Path(folder) / "tree")
        for call in ("1", "2"):
            shutil.copytree(carried / call, tree / ".fifteen" / call)
        for call in ("1", "2"):
            if call in wanted:
                rehearse(call, told, tree, Path(folder))
                shutil.copytree(Path(folder) / f"out{call}", carried / f"rehearsed{call}", dirs_exist_ok=True)
        if "cache" in wanted:
            told.say("\n## Kernels and kills\n")
            room = Path(folder) / "again"
            run(". lab/bench/gpu/fifteen/common.sh 1 --rehearse", tree, OUT=str(room / "out"), ROOM=str(room))
            kernels(told, tree, room)
            killed(told, tree, room)
    return told.code


def rehearse(call: str, told: Told, tree: Path, room: Path) -> None:
    told.say(f"\n## Call {call}\n\n| archive | MB |\n|---|---|\n{sizes(tree / '.fifteen' / call)}\n\n```")
    out = room / f"out{call}"
    command = f"bash lab/bench/gpu/fifteen/call{call}.sh --rehearse"
    done = run(command, tree, OUT=str(out), ROOM=str(room / f"room{call}"))
    told.say(
        "\n".join(line for line in done.stdout.splitlines() if " s  " in line[:8] or line.startswith("TransformerE"))
    )
    told.say("```\n")
    ended = done.returncode == 0 and done.stdout.rstrip().endswith("end")
    told.check(f"call {call} came to its end", ended, done.stderr[-2000:])
    failed = [line for line in done.stdout.splitlines() if "exit code" in line and not line.endswith("exit code 0")]
    told.check("every part and run of it has exit code 0", not failed, "; ".join(failed))
    told.parts(json.loads((out / "gpu.json").read_text()))
    files = [path for path in out.rglob("*") if path.is_file()]
    fine = len(files) <= MOST_FILES and all(path.stat().st_size <= MOST_BYTES for path in files)
    told.check(f"{len(files)} files of results, the largest {max(f.stat().st_size for f in files):,} bytes", fine)


class Told:
    """What was said, and whether all is as it must be."""

    code = 0

    def say(self, line: str) -> None:
        print(line, flush=True)

    def check(self, what: str, fine: bool, else_: str = "") -> None:
        self.say(f"- {what}: {'yes' if fine else '**NO** ' + else_}")
        self.code |= not fine

    def parts(self, report: dict[str, object]) -> None:
        said: dict[str, dict[str, object]] = report  # type: ignore[assignment]
        self.say(f"- versions: {json.dumps(said['machine']['versions'])}")
        for name in said["shows"]:
            left = said["left_out"].get(name, {})
            self.say(
                f"- part {name}: {said['failed'].get(name, 'came to its end')}"
                + (f"; left out: {left}" if left else "")
            )
        missed = [f"{each['name']} = {each['value']}" for each in report["results"] if not each["passed"]]  # type: ignore[attr-defined]
        self.check(f"{len(report['results'])} results that need no GPU are as they must be", not missed, str(missed))  # type: ignore[arg-type]


def checkout(tree: Path) -> Path:
    """The tracked files that the calls need."""
    from lab.bench.gpu.fifteen.needed import NOT_NEEDED

    left_out = [f":(exclude){path}" for path in NOT_NEEDED]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", ".", *left_out], cwd=CHECKOUT, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, tree / name, follow_symlinks=False)
    return tree


def sizes(folder: Path) -> str:
    return "\n".join(f"| {path.name} | {path.stat().st_size / 1e6:.1f} |" for path in sorted(folder.glob("*.xz")))


def environment(**more: str) -> dict[str, str]:
    return {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": tempfile.gettempdir(), **more}


def run(command: str, tree: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], cwd=tree, env=environment(**more), capture_output=True, text=True)


def kernels(told: Told, tree: Path, room: Path) -> None:
    """A process that asks for every kernel of the list finds all in the carried cache."""
    paths = f"{tree}/.fifteen/1/stand_ins:{room}/site:{tree}"
    done = run(f"python3 -m lab.bench.gpu.fifteen.kernels {room}/kernels", tree, PYTHONPATH=paths)
    last = (done.stdout.splitlines() or ["nothing"])[-1]
    told.check(f"a second process compiles nothing ({last})", " 0 compiled" in last, done.stderr[-2000:])


def killed(told: Told, tree: Path, room: Path) -> None:
    """A part that is killed after its first row, and the one after it."""
    import psutil

    out, paths = room / "killed", f"{tree}/.fifteen/1/stand_ins:{room}/site:{tree}"
    command = [sys.executable, "-m", "lab.bench.gpu", "--rehearse", "--out", str(out), "vocabulary", "launch"]
    own = environment(PYTHONPATH=paths, OMP_NUM_THREADS="1")
    process = subprocess.Popen(command, cwd=tree, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal, rows = out / "gpu.jsonl", 0
    while process.poll() is None and not rows:
        time.sleep(0.02)
        rows = journal.read_text().count('"row"') if journal.exists() else 0
    for part in psutil.Process(process.pid).children():
        part.kill()
    process.wait()
    report = json.loads((out / "gpu.json").read_text())
    fine = len(report["rows"]["vocabulary"]) >= rows > 0 and len(report["rows"]["launch"]) > 0
    told.check(
        f"a part killed after {rows} of its rows leaves them, and the next part runs",
        fine and "vocabulary" in report["failed"] and "launch" not in report["failed"],
    )


if __name__ == "__main__":
    sys.exit(main())
