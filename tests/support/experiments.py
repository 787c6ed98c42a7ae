"""Experiments without a model and data, for what looks at settings alone."""

from typing import Any

from fp8rl.rl.experiment import Experiment, parse_experiment

VALUES = {"model": {"path": "/m"}, "data": {"train": "/t"}}


def experiment(**sections: Any) -> Experiment:
    """The defaults with these sections changed."""
    return parse_experiment({**VALUES, **sections})
