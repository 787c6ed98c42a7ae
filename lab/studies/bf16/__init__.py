"""What BF16 does to values, products and training."""

from lab.studies.bf16.study import STUDY

__all__ = ["STUDY"]
