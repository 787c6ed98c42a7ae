"""Where the mismatch between trainer and engine comes from: by op, by cause, by expert and by position."""

from diagnose.attribution.attribute import attribute
from diagnose.attribution.result import (
    Attribution,
    Cause,
    ExpertDifference,
    Finding,
    OpDifference,
    PositionDifference,
)

__all__ = [
    "Attribution",
    "Cause",
    "ExpertDifference",
    "Finding",
    "OpDifference",
    "PositionDifference",
    "attribute",
]
