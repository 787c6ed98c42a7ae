"""The experiment spec: its sections, loading with inheritance and overrides, and its validation."""

from rl.experiment.experiment import Experiment
from rl.experiment.loading import load_experiment, read_resolved
from rl.experiment.validation import parse_experiment

__all__ = ["Experiment", "load_experiment", "parse_experiment", "read_resolved"]
