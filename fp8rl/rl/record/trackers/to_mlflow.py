"""A run in MLflow: at MLFLOW_TRACKING_URI, or in a database of the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from fp8rl.numerics.core.files import write_atomically
from fp8rl.numerics.core.section import dotted
from fp8rl.rl.record.metrics import metric
from fp8rl.rl.record.trackers import Tracked, Tracker

_LONGEST = 500
"""Characters of a parameter, which MLflow bounds."""


def start(run: Tracked) -> MLflow:
    return MLflow(run)


class MLflow(Tracker):
    """Metrics under their names, units and meanings as an artifact, the experiment's keys as parameters."""

    def __init__(self, run: Tracked) -> None:
        from mlflow import MlflowClient

        place, own = run.place("mlflow"), os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(own or f"sqlite:///{place / 'mlflow.db'}")
        number = place / "run_id"
        if run.resumed and number.is_file():
            self._id = number.read_text().strip()
            self._client.update_run(self._id, "RUNNING")
        else:
            files = None if own else (place / "files").as_uri()
            experiment = self._client.get_experiment_by_name(run.project)
            home = experiment.experiment_id if experiment else self._client.create_experiment(run.project, files)
            self._id = self._client.create_run(home, run_name=run.name).info.run_id
            write_atomically(number, self._id)
            for key, value in dotted(run.config):
                if value != {}:
                    self._client.log_param(self._id, key, str(value)[:_LONGEST])
        self._described: dict[str, dict[str, str]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, [Metric(name.replace("@", "_at_"), value, now, step) for name, value in metrics.items()]
        )
        if metrics.keys() - self._described:
            self._described |= {name: {"unit": metric(name).unit, "meaning": metric(name).meaning} for name in metrics}
            self._client.log_dict(self._id, self._described, "metrics.json")

    def finish(self, exit_code: int, summary: Mapping[str, Any], seconds: float) -> None:
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")
