"""`python -m lab.bench.faults [NAME ...]`: every fault, its outcome and its duration, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.bench.faults import processes, surroundings, wires
from lab.bench.faults.lab import Found, Lab, Outcome, tried
from lab.studies.harness.lab import in_own_process

RUNS: tuple[Callable[[Lab], Found], ...] = (
    processes.engine_killed,
    processes.engine_hung,
    processes.trainer_killed,
    processes.trainer_hung,
    processes.trainer_lost_too_often,
    processes.interrupted_once,
    processes.interrupted_twice,
    processes.interrupted,
    processes.interrupted_while_ray_starts,
    processes.interrupted_while_both_sides_start,
    processes.hung_end,
    processes.terminal_closed,
    processes.run_killed,
    processes.driver_killed,
    processes.driver_killed_within_a_checkpoint,
    processes.everything_killed,
    processes.ray_head_killed,
    processes.ray_node_killed,
    processes.wandb_killed,
    surroundings.engine_slow,
    surroundings.memory_short,
    surroundings.clock_set,
    surroundings.full_disk_under_the_record,
    surroundings.full_disk_under_a_checkpoint,
    surroundings.checkpoint_flipped,
    surroundings.dataset_line_damaged,
    surroundings.dataset_line_damaged_meanwhile,
)
"""Faults of whole runs, each by its name."""
WIRES = "wires"
"""Stands for the faults between trainer and engine, which share one pair."""


def main() -> int:
    names = [WIRES, *(fault.__name__ for fault in RUNS)]
    parser = argparse.ArgumentParser(prog="python -m lab.bench.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of all runs' specs")
    arguments = parser.parse_args()
    chosen = arguments.names or names
    if unknown := set(chosen) - set(names):
        parser.error(f"found {sorted(unknown)}, expected names out of {names}")
    outcomes: dict[str, Outcome] = {}

    def keep(found: Mapping[str, Outcome]) -> None:
        outcomes.update(found)
        if arguments.json:
            data = {name: asdict(each) for name, each in outcomes.items()}
            arguments.json.write_text(json.dumps(data, indent=1) + "\n")

    keep(in_own_process(wires.run) if WIRES in chosen else {})
    with tempfile.TemporaryDirectory(prefix="fp8rl-faults-") as folder, Lab(Path(folder), tuple(arguments.set)) as lab:
        for fault in RUNS:
            if fault.__name__ in chosen:
                keep(tried([fault], lab, partial(print, file=sys.stderr)))
    Console().print(_table(outcomes))
    return 1 if any(outcome.wrong for outcome in outcomes.values()) else 0


def _table(outcomes: Mapping[str, Outcome]) -> Table:
    table = Table("fault", "how it is injected", "what happens", "seconds")
    for name, outcome in outcomes.items():
        seconds = ", ".join(f"{what} {value:.1f}" for what, value in outcome.found.seconds.items())
        table.add_row(name, outcome.injected, outcome.found.happened or f"wrong: {outcome.wrong}", seconds)
    return table


if __name__ == "__main__":
    sys.exit(main())
