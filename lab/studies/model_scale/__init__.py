"""How the mismatch of trainer and engine grows with the size of the model."""

from lab.studies.model_scale.study import STUDY

__all__ = ["STUDY"]
