"""The agreement on spec and bytes: digest, quantized modules, scales, dtypes around the products, and the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from fp8rl.diagnose.preflight.preflight_report import Check, judged, refused
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.families.mlp import TOPK
from fp8rl.models.shape import Shape
from fp8rl.models.tensors import SCALE_SUFFIX
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.digest import tensor_digest
from fp8rl.numerics.spec import Scale
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.rules import check_model_layout
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rollout.errors import HandshakeError
from fp8rl.rollout.protocol import EngineReport
from fp8rl.rollout.server.handshake import differences
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.bridge import SyncReport
from fp8rl.weight_sync.manifest import SyncError

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer  # megatron is for the ranks, not for the driver

_SAME_REPORT = "the engine reports the trainer's spec, numerics and hooks"
_RESTART = "Start the engine from this spec, in this environment."
_SHOWN = 5
"""Names that a message spells out."""


def handshake(
    numerics: NumericsConfig, adapter: AdapterSection | None, report: EngineReport, architecture: str | None = None
) -> Check:
    """The engine's report on itself against what the trainer runs. adapter: beside the engine's weights. architecture:
    the user's file that has it."""
    expected = expected_report(numerics, adapter, architecture)
    problems = differences(expected, report)
    return judged(
        "spec",
        "handshake",
        not problems,
        found="\n".join(problems) or _reported(expected),
        expected=_SAME_REPORT,
        remedy=_RESTART,
    )


def refused_handshake(error: HandshakeError) -> Check:
    """The handshake that an engine did not pass when it started."""
    return Check("spec", "handshake", False, str(error), _SAME_REPORT, _RESTART)


def quantized_modules(trainer: Iterable[str], engine: Iterable[str]) -> Check:
    """Check that the same weights, by exact HF name, run in FP8 on both sides."""
    trainer_names, engine_names = set(trainer), set(engine)
    only = {"trainer": trainer_names - engine_names, "engine": engine_names - trainer_names}
    lines = [f"only in the {side}: {_some(names)}" for side, names in only.items() if names]
    return judged(
        "spec",
        "quantized modules",
        not lines,
        found="; ".join(lines) or f"{len(engine_names)} weights, the same on both sides",
        expected="equal sets of names",
        remedy="Give both sides one spec and one precision: numerics.trainer and numerics.rollout, numerics.scope.",
    )


def scale_formats(scales: Iterable[tuple[str, Tensor]], served: Iterable[str], scale: Scale) -> Check:
    """Check that scales are FP32, finite and above 0, and powers of two where the spec says so.

    served: the names of all scales that the engine holds; one that is missing in `scales` fails.
    """
    tensors = numbers = 0
    unseen = set(served)
    wrong = []
    for name, tensor in scales:
        tensors, numbers = tensors + 1, numbers + tensor.numel()
        unseen.discard(name)
        if tensor.dtype is not torch.float32 or not _well_formed(tensor, scale):
            wrong.append(f"{name} ({str(tensor.dtype).removeprefix('torch.')})")
    wrong += [f"{name} (not the one that was quantized)" for name in unseen]
    kind = "powers of two" if scale == "pow2" else "finite numbers above 0"
    return judged(
        "spec",
        "scale formats",
        not wrong,
        found=f"{len(wrong)} of {tensors + len(unseen)} scale tensors otherwise: {_some(wrong)}"
        if wrong
        else f"{numbers} scales in {tensors} tensors, all {kind} in FP32",
        expected=f"FP32 scales that are {kind}",
        remedy="Quantize the engine's checkpoint with this spec: fp8rl convert, or a sync.",
    )


def router_precision(mode: str, trainer: Iterable[tuple[str, str]], provides: Iterable[str]) -> Check:
    """The dtypes of the trainer's router logits and probabilities, and whose router the engine runs.

    trainer: as `Observed.routers`. provides: of the engine's report; where it has a router of ours, that is
    `numerics.ops.route`, which takes the softmax of BF16 logits in FP32 and keeps it. Megatron's own rounds the
    probabilities to BF16.
    """
    seen = sorted(set(trainer))
    shared = TOPK.name in provides
    sides = [f"trainer: {logits} logits, {probs} probabilities" for logits, probs in seen]
    exact = mode == "exact"
    return judged(
        "spec",
        "router precision",
        shared == exact and seen == [("bfloat16", "float32" if exact else "bfloat16")],
        found="; ".join([*sides, f"engine: {'the shared op' if shared else 'its own router'}"]),
        expected="the shared router op on both sides: BF16 logits, FP32 probabilities"
        if exact
        else "each library's own router; Megatron's rounds probabilities to BF16, SGLang's keeps them in FP32",
        remedy="Reinstall this distribution on both sides: a router of another precision is in place.",
    )


def kv_cache_dtype(report: EngineReport) -> Check:
    """Check that keys and values stand in the cache as they were computed."""
    return judged(
        "spec",
        "KV cache",
        (report.dtype, report.kv_cache_dtype) == ("bfloat16", "bfloat16"),
        found=f"kv_cache_dtype {report.kv_cache_dtype}, dtype {report.dtype}",
        expected="keys and values in BF16, as in the trainer",
        remedy="Start the engine without --kv-cache-dtype.",
    )


def served_scales(checkpoint: Path, manifest: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The scales of the checkpoint that an engine holds unchanged, by its manifest of digests."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():
                if name.endswith(SCALE_SUFFIX):
                    tensor = stored.get_tensor(name)
                    if manifest.get(name) == tensor_digest(tensor):
                        yield name, tensor


def scale_names(manifest: Mapping[str, str]) -> list[str]:
    """The scales that an engine holds."""
    return sorted(name for name in manifest if name.endswith(SCALE_SUFFIX))


def quantized_names(manifest: Mapping[str, str]) -> list[str]:
    """The weights that an engine computes with in dequantized form: their digest carries a version."""
    return sorted(name for name, digest in manifest.items() if "@" in digest)


def _well_formed(scales: Tensor, scale: Scale) -> bool:
    mantissa = torch.frexp(scales)[0]
    return bool((scales.isfinite() & (scales > 0) & ((mantissa == 0.5) | (scale != "pow2"))).all())


def _reported(expected: EngineReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in expected.versions.items())
    return f"spec {expected.spec_digest}, {len(expected.hooks)} hooks, {versions}"


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    rest = len(listed) - _SHOWN
    return ", ".join(listed[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


# What the live trainer does in a forward pass, seen from within. Runs on the trainer's ranks.


@dataclass(frozen=True)
class Observed:
    """One rank in one forward pass."""

    quantized: list[str]
    """HF names of the weights whose products ran in FP8, in order."""
    routers: list[tuple[str, str]]
    """(dtype of the logits, dtype of the probabilities) of every router call, each pair once."""


def observe(trainer: Trainer, batch: TokenBatch) -> Observed:
    """Score the batch, and record the dtypes of its routers and the weights that it quantizes."""
    from megatron.core.transformer.moe.router import TopKRouter

    seen: set[tuple[str, str]] = set()

    def watched(routing: Callable[..., Any]) -> Callable[..., Any]:
        def route(logits: Any, *args: Any, **kwargs: Any) -> Any:
            result = routing(logits, *args, **kwargs)
            dtypes = (str(each.dtype).removeprefix("torch.") for each in (logits, result[0]))
            seen.add((next(dtypes), next(dtypes)))
            return result

        return route

    routers: list[Any] = [module for module in trainer.model.modules() if isinstance(module, TopKRouter)]
    trainer.weights_changed()  # so that the cache holds what this pass asks for, and no more
    for router in routers:
        router.routing = watched(router.routing)  # hides the class's method until it is deleted
    try:
        trainer.score(batch)
    finally:
        for router in routers:
            del router.routing
    rows = trainer.weights.rows(trainer.model)
    quantized = [row.name for name in trainer.quantized_parameters() for row in rows[name]]
    return Observed(sorted(quantized), sorted(seen))


# Does the engine hold the trainer's weights? A sync, and its manifest.


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

# What can be told before a process is started.


def block_alignment(shape: Shape, experiment: Experiment) -> Check:
    """Check that every piece of a fused weight is whole quantization blocks on every rank.

    Otherwise trainer and engine quantize the same weights into different blocks, hence bytes.
    """
    name = "block alignment"
    try:
        check_model_layout(shape, experiment)
    except UserError as error:
        return refused("bytes", name, error)
    sizes = shape.sizes
    held = {
        "hidden_size": sizes.hidden_size,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.ffn_size,
        "moe_intermediate_size": sizes.expert_size,
    }
    said = ", ".join(f"{name} {size}" for name, size in held.items() if size)
    layout = ", ".join(f"{axis} {getattr(experiment.trainer, axis)}" for axis in ("tp", "pp", "ep", "dp"))
    return Check("bytes", name, True, f"{said} on {layout}", "whole quantization blocks on every rank")


def same_precision(experiment: Experiment) -> Check:
    """Check that both sides run the spec, or both BF16."""
    sides = {"trainer": experiment.numerics.trainer != "bf16", "rollout": experiment.numerics.rollout != "bf16"}
    return judged(
        "spec",
        "precision of both sides",
        sides["trainer"] == sides["rollout"],
        found=f"numerics.trainer={experiment.numerics.trainer}, numerics.rollout={experiment.numerics.rollout}",
        expected="FP8 on both sides or BF16 on both sides",
        remedy=SAME_PRECISION,
    )


SAME_PRECISION = "Run both sides in one precision: numerics.trainer=fp8 numerics.rollout=fp8, or bf16 for both."
