"""The experiment spec: its sections, loading with inheritance and overrides, and its validation."""

from fp8rl.rl.experiment.experiment import Experiment, with_keys
from fp8rl.rl.experiment.loading import load_experiment, read_resolved
from fp8rl.rl.experiment.validation import parse_experiment

__all__ = ["Experiment", "load_experiment", "parse_experiment", "read_resolved", "with_keys"]
