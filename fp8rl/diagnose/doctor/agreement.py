"""The agreement on spec and bytes: digest, quantized modules, scales, dtypes around the products, and the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from fp8rl.diagnose.report import Finding
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.tensors import SCALE_SUFFIX
from fp8rl.numerics import kv
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.digest import tensor_digest
from fp8rl.numerics.spec import Scale
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rollout.engine.protocol import EngineReport, differences
from fp8rl.rollout.types import HandshakeError
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.bridge import SyncReport
from fp8rl.weight_sync.manifest import SyncError, some_of

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer  # megatron is for the ranks, not for the driver

Agreement = Literal["spec", "bytes", "logprobs"]
AGREEMENTS: tuple[Agreement, ...] = ("spec", "bytes", "logprobs")


def judged(agreement: Agreement, name: str, ok: bool, found: str, expected: str, remedy: str = "") -> Finding:
    """Make the finding of a check of one agreement."""
    return Finding(f"same {agreement}, {name}", found, expected, remedy, "ok" if ok else "error")


# What can be told before a process is started.

SAME_PRECISION = "Run both sides in one precision: numerics.trainer=fp8 numerics.rollout=fp8, or bf16 for both."


def same_precision(experiment: Experiment) -> Finding:
    """Check that both sides run the spec, or both BF16."""
    trainer, rollout = experiment.numerics.trainer, experiment.numerics.rollout
    ok = (trainer == "bf16") == (rollout == "bf16")
    found = f"numerics.trainer={trainer}, numerics.rollout={rollout}"
    expected = "FP8 on both sides or BF16 on both sides"
    return judged("spec", "precision of both sides", ok, found, expected, SAME_PRECISION)


# The agreement on the spec, between the live sides.

_SAME_REPORT = "the engine reports the trainer's spec, numerics and hooks"
_RESTART = "Start the engine from this spec, in this environment."


def handshake(
    numerics: NumericsConfig, adapter: AdapterSection | None, report: EngineReport, architecture: str | None = None
) -> Finding:
    """Compare the engine's report on itself with what the trainer runs.

    adapter: the engine's adapters. architecture: the user's file that defines the model's architecture.
    """
    expected = expected_report(numerics, adapter, architecture)
    problems = differences(expected, report)
    versions = ", ".join(f"{name} {version}" for name, version in expected.versions.items())
    same = f"spec {expected.spec_digest}, {len(expected.hooks)} hooks, {versions}"
    return judged("spec", "handshake", not problems, "\n".join(problems) or same, _SAME_REPORT, _RESTART)


def refused_handshake(error: HandshakeError) -> Finding:
    """Make the check of an engine that failed its handshake at the start."""
    return judged("spec", "handshake", False, str(error), _SAME_REPORT, _RESTART)


def quantized_modules(trainer: Iterable[str], engine: Iterable[str]) -> Finding:
    """Check that the same weights, by exact HF name, run in FP8 on both sides."""
    ours, theirs = set(trainer), set(engine)
    only = {"trainer": ours - theirs, "engine": theirs - ours}
    lines = [f"only in the {side}: {some_of(sorted(names))}" for side, names in only.items() if names]
    found = "; ".join(lines) or f"{len(theirs)} weights, the same on both sides"
    remedy = "Give both sides one spec and one precision: numerics.trainer and numerics.rollout, numerics.scope."
    return judged("spec", "quantized modules", not lines, found, "equal sets of names", remedy)


def scale_formats(scales: Iterable[tuple[str, Tensor]], served: Iterable[str], scale: Scale) -> Finding:
    """Check that scales are FP32, finite and above 0, and powers of two if the spec says so.

    served: the names of all scales that the engine holds. The check fails if one of them is missing in `scales`.
    """
    tensors = numbers = 0
    unseen = set(served)
    wrong = []
    for name, tensor in scales:
        tensors, numbers = tensors + 1, numbers + tensor.numel()
        unseen.discard(name)
        well = tensor.dtype is torch.float32 and bool((tensor.isfinite() & (tensor > 0)).all())
        if not well or (scale == "pow2" and bool((torch.frexp(tensor)[0] != 0.5).any())):
            wrong.append(f"{name} ({str(tensor.dtype).removeprefix('torch.')})")
    wrong += [f"{name} (not the one that was quantized)" for name in unseen]
    kind = "powers of two" if scale == "pow2" else "finite numbers above 0"
    found = f"{numbers} scales in {tensors} tensors, all {kind} in FP32"
    if wrong:
        found = f"{len(wrong)} of {tensors + len(unseen)} scale tensors otherwise: {some_of(sorted(wrong))}"
    remedy = "Quantize the engine's checkpoint with this spec: fp8rl convert, or a sync."
    return judged("spec", "scale formats", not wrong, found, f"FP32 scales that are {kind}", remedy)


def served_scales(checkpoint: Path, manifest: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the scales of the checkpoint that an engine holds unchanged, by its manifest of digests."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():
                if name.endswith(SCALE_SUFFIX):
                    tensor = stored.get_tensor(name)
                    if manifest.get(name) == tensor_digest(tensor):
                        yield name, tensor


def kv_cache_dtype(numerics: NumericsConfig, report: EngineReport) -> Finding:
    """Check that the cache has keys and values in the format in which the trainer attends to them."""
    kept = numerics.kv_format.dtype_name
    ok = (report.dtype, report.kv_cache_dtype) == ("bfloat16", kept)
    found = f"kv_cache_dtype {report.kv_cache_dtype}, dtype {report.dtype}"
    expected = f"keys and values in {kept}, as in the trainer"
    return judged("spec", "KV cache", ok, found, expected, kv.REMEDY)


@dataclass(frozen=True)
class Observed:
    """What was observed on one rank of the live trainer in one forward pass."""

    quantized: list[str]
    """HF names of the weights whose products ran in FP8, in order."""


def observe(trainer: Trainer, batch: TokenBatch) -> Observed:
    """Score the batch on a rank, and record the weights that it quantizes."""
    trainer.weights_changed()  # so that the cache holds what this pass asks for, and no more
    trainer.score(batch)
    rows = trainer.weights.rows(trainer.model)
    return Observed(sorted(row.name for name in trainer.quantized_parameters() for row in rows[name]))


# The agreement on bytes: does the engine hold the trainer's weights? A sync, and its manifest.

_EQUAL = "every tensor's digest equal in trainer and engine"


def manifest_of(report: SyncReport) -> Finding:
    """Make the check of a sync that succeeded."""
    verified, other = report.verified_tensors, report.mismatched_tensors
    found = f"{verified} of {verified + other} tensors equal, {report.bytes} bytes in {report.seconds:.2f} s"
    return judged("bytes", "manifest", other == 0 and verified > 0, found, _EQUAL, "See the tensors named.")


def refused_sync(error: SyncError) -> Finding:
    """Make the check of a sync that found differences, or failed."""
    remedy = "Compare the versions of sglang and of this distribution in the engine's and the trainer's environment."
    return judged("bytes", "manifest", False, str(error), _EQUAL, remedy)
