"""Attribution finds the source of a mismatch of trainer and engine: by op, by cause, by expert and by position."""

from fp8rl.diagnose.attribution.attribute import attribute
from fp8rl.diagnose.attribution.attribution_report import (
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
