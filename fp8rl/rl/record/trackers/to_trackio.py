"""A run in Trackio, in `trackio/` of its folder, or where TRACKIO_DIR, TRACKIO_SERVER_URL or TRACKIO_SPACE_ID say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fp8rl.rl.record.metrics import METRICS
from fp8rl.rl.record.trackers import Tracked, Tracker


def start(run: Tracked) -> Trackio:
    return Trackio(run)


class Trackio(Tracker):
    """Metrics in groups by the part before the slash; units stand in the config."""

    def __init__(self, run: Tracked) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.place("trackio")))  # read while it is imported
        import trackio

        config = {**run.config, "units": {name: row.unit for name, row in METRICS.items() if row.unit}}
        self._run = trackio.init(
            project=run.project,
            name=run.name,
            config=config,
            resume="allow" if run.resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, exit_code: int, summary: Mapping[str, Any], seconds: float) -> None:
        self._run.finish()
