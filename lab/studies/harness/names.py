"""The studies by name."""

from __future__ import annotations

import difflib
import importlib

from fp8rl.numerics.core.errors import user_error
from lab.studies.harness.study import Study

NAMES = (
    "precision_cases",
    "gradient_direction",
    "gemm_error",
    "gemm_trace",
    "scale_formats",
    "failure_modes",
    "model_scale",
    "wire_formats",
    "bf16",
    "adapters",
)
"""The studies' names, in the order in which they run."""


def load(name: str) -> Study:
    """The study of a name.

    Raises:
        UserError: there is none.
    """
    if name not in NAMES:
        nearest = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
        remedy = f"Did you mean {nearest}? Correct it, or say --all."
        raise user_error("study", found=name, expected=f"one of {', '.join(NAMES)}", remedy=remedy)
    found: Study = importlib.import_module(f"lab.studies.{name}").STUDY
    return found
