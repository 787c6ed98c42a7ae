"""A run as TensorBoard's event files, in `tensorboard/` of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl.rl.record.metrics import metric
from fp8rl.rl.record.trackers import Tracked, Tracker


class TensorBoard(Tracker):
    """Metrics as scalars: the group is the part before the slash, unit and meaning are the description."""

    def __init__(self, run: Tracked) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(run.place("tensorboard")))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            row = metric(name)
            described = f"{row.meaning} ({row.unit})" if row.unit else row.meaning
            self._writer.add_scalar(name, value, step, description=described)
        self._writer.flush()

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        self._writer.close()
