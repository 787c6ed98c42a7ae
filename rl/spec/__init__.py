"""The experiment spec: its sections, loading with inheritance and overrides, and its validation."""

from rl.spec.experiment import ExperimentSpec
from rl.spec.loading import load_spec, read_resolved_spec
from rl.spec.validation import parse_spec

__all__ = ["ExperimentSpec", "load_spec", "parse_spec", "read_resolved_spec"]
