"""Decides whether a spec can run on a given machine, with which kernels and engine. If not, it says why.

It probes nothing. A run uses the same rules: `numerics.backend.dispatch` for kernels, `trainer.megatron.lowering` for
TransformerEngine, `rollout.engine.server.arguments` for the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from packaging.specifiers import SpecifierSet

from fp8rl.diagnose.doctor.doctor_report import Blocks, Diagnosis, Features, Side
from fp8rl.diagnose.doctor.machine import Machine
from fp8rl.diagnose.report import Finding, Grade
from fp8rl.numerics.backend.implementation import (
    BLACKWELL,
    FEWEST_CAPABILITY,
    HOPPER,
    deepgemm_lacks,
    implementation_for,
)
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment.budget.job import Gpu
from fp8rl.rl.experiment.preconditions.rules import Target, native_refusals, shared_memory_refusals
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.server.arguments import server_arguments
from fp8rl.trainer.megatron.lowering import by_mx, lower

BLOCK_CUDA = (12, 9)
"""The first CUDA release whose cuBLASLt multiplies 128-blocks. TransformerEngine asks for that release."""

_ALWAYS = ("torch", "megatron-core", "transformers", "sglang", "ray", "wandb")
_WITH_GPU = ("triton", "sglang-kernel", "sgl-deep-gemm", "flashinfer-python")
_DEEPGEMM = "sgl-deep-gemm"
_TE = ("transformer_engine", "transformer_engine_torch")
_PATCHED = {"torch", "megatron-core", "sglang"}
"""Libraries that are hooked or patched: other versions of them are refused."""
_INSTALL = {"cpu": "Run `make install`.", "cuda": "Run `make install-gpu`, or use the image: requirements/Dockerfile."}


def judge(machine: Machine, numerics: NumericsConfig) -> Diagnosis:
    """Say where both sides of `numerics` run on `machine`, and what prevents it, the gravest first."""
    findings = [
        *_of_the_install(machine, numerics),
        *_of_the_gpus(machine),
        *_of_the_compilers(machine),
        *_of_the_arithmetic(machine, numerics),
        *_of_native_mode(machine, numerics),
    ]
    findings.sort(key=lambda finding: finding.grade != "error")
    able = tuple(features(gpu, machine.torch_cuda) for gpu in machine.gpus)
    sides = _trainer(machine, numerics), _engine(machine, numerics)
    return Diagnosis(machine, numerics.mode, numerics.spec.digest(), sides, able, tuple(findings))


def features(gpu: Gpu, torch_cuda: str | None) -> Features:
    """Say what one GPU can do under torch's CUDA release.

    Blackwell multiplies blocks as MX, only with power-of-two scales.
    """
    recent = torch_cuda is not None and _numbers(torch_cuda) >= BLOCK_CUDA
    hopper, blackwell = HOPPER <= gpu.capability < BLACKWELL, gpu.capability >= BLACKWELL
    blocks: Blocks = "native" if hopper and recent else "by MX" if blackwell and recent else "no"
    return Features(gpu.capability >= FEWEST_CAPABILITY, blocks, blackwell)


def _device(machine: Machine) -> str:
    return "cuda" if machine.torch_sees else "cpu"


def _weakest(machine: Machine) -> Gpu | None:
    """Return the weakest GPU. A run may use any GPU, so it must suit the weakest."""
    return min(machine.gpus, key=lambda gpu: gpu.capability) if machine.torch_sees else None


def _shared_ops(machine: Machine, spec: QuantSpec, deepgemm: bool | None) -> str:
    capability = gpu.capability if (gpu := _weakest(machine)) else None
    if implementation_for(capability, spec) != "triton":
        return "shared ops, torch" + ", emulated FP8" * spec.quantized
    if deepgemm is None and deepgemm_lacks(capability, machine.libraries.get(_DEEPGEMM) is not None):
        deepgemm = False
    if deepgemm is False or not spec.quantized:
        return "shared ops, Triton kernels"
    surely = "" if deepgemm else " if it gives the kernels' bits"
    return f"shared ops, Triton kernels, FP8 products on DeepGEMM{surely}"


def _trainer(machine: Machine, numerics: NumericsConfig) -> Side:
    spec, device = numerics.trainer_spec, _device(machine)
    if numerics.mode == "exact":
        return Side("trainer", numerics.trainer, device, _shared_ops(machine, spec, numerics.deepgemm))
    ops = "TransformerEngine" if _has_te(machine) else "Megatron-core" + ", emulated FP8" * spec.quantized
    return Side("trainer", numerics.trainer, device, ops)


def _engine(machine: Machine, numerics: NumericsConfig) -> Side:
    spec, device = numerics.rollout_spec, _device(machine)
    arguments = server_arguments(
        Path(), RolloutSection(), port=0, weight_version=0, cuda=machine.torch_sees, mode=numerics.mode
    )
    option = "--attention-backend"
    attention = arguments[arguments.index(option) + 1] if option in arguments else "SGLang's choice"
    if numerics.mode == "exact":
        ops = _shared_ops(machine, spec, numerics.deepgemm)
    else:
        ops = "SGLang" + ", emulated FP8" * (spec.quantized and device == "cpu")
    return Side("engine", numerics.rollout, device, ops, attention)


def _of_the_install(machine: Machine, numerics: NumericsConfig) -> Iterator[Finding]:
    device = _device(machine)
    for name in (*_ALWAYS, *(_WITH_GPU if machine.torch_sees else ())):
        version, wanted = machine.libraries.get(name), machine.wanted.get(name, "")
        if version is None:
            yield Finding(name, "not installed", wanted or "installed", _INSTALL[device])
        elif not SpecifierSet(wanted).contains(version, prereleases=True):
            grade: Grade = "error" if name in _PATCHED else "warning"
            yield Finding(name, version, wanted, _INSTALL[device], grade)
    if machine.torch_sees and numerics.mode == "native":
        yield from _of_transformer_engine(machine)
    stubs = machine.libraries.get("fp8rl-cpu-stubs") is not None
    if machine.torch_sees and stubs:
        expected = "SGLang's own kernels, beside a GPU"
        yield Finding("fp8rl-cpu-stubs", "installed", expected, "Run `pip uninstall fp8rl-cpu-stubs`.")
    if not machine.torch_sees and not stubs:
        expected = "the stand-ins for SGLang's CUDA kernels, without which its CPU engine does not start"
        yield Finding("fp8rl-cpu-stubs", "not installed", expected, _INSTALL["cpu"])


def _of_transformer_engine(machine: Machine) -> Iterator[Finding]:
    """Judge TransformerEngine. Without it native mode's trainer runs Megatron-core's ops and emulates FP8."""
    (name, extension), wanted = _TE, machine.wanted.get(_TE[0], "")
    version = machine.libraries.get(name)
    if version is None:
        expected = f"{wanted}, because without it FP8 is emulated slowly"
        yield Finding(name, "not installed", expected, _INSTALL["cuda"], "warning")
    elif machine.libraries.get(extension) is None:
        yield Finding(extension, "not installed", f"{version}, the version of {name}", _INSTALL["cuda"])
    elif not SpecifierSet(wanted).contains(version, prereleases=True):
        yield Finding(name, version, wanted, _INSTALL["cuda"], "warning")


def _of_the_gpus(machine: Machine) -> Iterator[Finding]:
    target = Target(machine.torch_sees, _has_te(machine), expandable_segments=machine.expandable_segments)
    yield from map(Finding.of_error, shared_memory_refusals(target))
    if not machine.gpus or machine.torch_sees:
        return
    found = f"{len(machine.gpus)} x {machine.gpus[0].name}, which torch does not see: the run stays on the CPU"
    if machine.torch_cuda is None:
        expected, remedy = "a torch that is built for CUDA", _INSTALL["cuda"]
    elif machine.driver_cuda and _numbers(machine.driver_cuda)[0] < _numbers(machine.torch_cuda)[0]:
        found = f"driver {machine.driver}, which serves CUDA {machine.driver_cuda}: the run stays on the CPU"
        expected, remedy = f"a driver for CUDA {machine.torch_cuda}, which torch needs", "Update the driver."
    else:
        expected, remedy = "GPUs that torch can use", "Look at CUDA_VISIBLE_DEVICES, and at what the container may use."
    yield Finding("gpu", found, expected, remedy, "warning")


def _of_the_compilers(machine: Machine) -> Iterator[Finding]:
    if machine.torch_sees:
        if machine.cc is None:
            yield Finding("C compiler", "none", "gcc or clang, for Triton's launchers", "Install gcc, or set CC.")
        if machine.nvcc is None:
            cuda = machine.torch_cuda
            expected = f"nvcc of CUDA {cuda}, as in torch: SGLang compiles some of its kernels when it starts"
            remedy = f"Install CUDA {cuda} (`make install-gpu` brings its compiler), or set CUDA_HOME to it."
            yield Finding("nvcc", machine.other_nvcc or "none", expected, remedy)
    elif machine.compiles is False:
        found = f"torch.compile does not work with {machine.cxx}" if machine.cxx else "none"
        yield Finding(
            "C++ compiler", found, "one, for speed; the bits stay the same", "Install g++, or set CXX.", "warning"
        )


def _of_the_arithmetic(machine: Machine, numerics: NumericsConfig) -> Iterator[Finding]:
    if numerics.mode != "exact":
        return
    if machine.row_variant is None:
        remedy = "Correct what the error names, or set numerics.mode=native."
        yield Finding("row invariance", f"a probe that failed: {machine.probe_error}", "a result", remedy)
    elif machine.row_variant:
        found = f"a token's result depends on its batch: {', '.join(machine.row_variant)}"
        expected = "row-invariant ops for exact mode"
        yield Finding("row invariance", found, expected, "Use another machine, or set numerics.mode=native.")
    if machine.without_deepgemm is not None:
        expected = "for numerics.deepgemm a Hopper GPU on which DeepGEMM gives our kernels' bits"
        yield Finding("DeepGEMM", machine.without_deepgemm, expected, "Set numerics.deepgemm=false.")


def _has_te(machine: Machine) -> bool:
    """Return whether TransformerEngine is installed: native mode's trainer then uses it (`trainer.device`)."""
    return machine.torch_sees and machine.libraries.get(_TE[0]) is not None


def _of_native_mode(machine: Machine, numerics: NumericsConfig) -> Iterator[Finding]:
    """Judge whether the libraries' products, which native mode uses on a GPU, support the spec."""
    gpu = _weakest(machine)
    if gpu is None or numerics.mode != "native":
        return
    target = Target(True, _has_te(machine), capability=gpu.capability)
    yield from map(Finding.of_error, native_refusals(numerics, True, target))
    blocks = numerics.trainer_spec.quantized and target.transformer_engine and not by_mx(numerics.trainer_spec)
    if blocks and gpu.capability >= HOPPER and features(gpu, machine.torch_cuda).blocks == "no":
        expected = "CUDA 12.9 or higher, for TransformerEngine's 128-blocks"
        remedy = "Set it to bf16, or numerics.mode=exact."
        yield Finding("numerics.trainer", f"fp8 with CUDA {machine.torch_cuda}", expected, remedy)
    try:
        lower(numerics, _has_te(machine))
    except UserError as error:
        yield Finding.of_error(error)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
