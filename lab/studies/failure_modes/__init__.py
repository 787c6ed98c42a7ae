"""What breaks when state or ops are kept in FP8 or BF16."""

from lab.studies.failure_modes.study import STUDY

__all__ = ["STUDY"]
