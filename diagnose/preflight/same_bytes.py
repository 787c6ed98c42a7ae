"""Does the engine hold the trainer's weights? A sync, and its manifest."""

from __future__ import annotations

from fp8rl.diagnose.preflight.check import Check, judged
from fp8rl.weight_sync.bridge import SyncReport
from fp8rl.weight_sync.manifest import SyncError


def manifest_of(report: SyncReport) -> Check:
    """The outcome of a sync that went through."""
    return judged(
        "bytes",
        "manifest",
        report.mismatched_tensors == 0 and report.verified_tensors > 0,
        found=f"{report.verified_tensors} of {report.verified_tensors + report.mismatched_tensors} tensors equal, "
        f"{report.bytes} bytes in {report.seconds:.2f} s",
        expected=_EXPECTED,
        remedy="See the tensors named.",
    )


def refused_sync(error: SyncError) -> Check:
    """The sync that found differences, or broke."""
    remedy = "Compare the versions of sglang and of this distribution in the engine's and the trainer's environment."
    return Check("bytes", "manifest", False, str(error), _EXPECTED, remedy)


_EXPECTED = "every tensor's digest equal in trainer and engine"
