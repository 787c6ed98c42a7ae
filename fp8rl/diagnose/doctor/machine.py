"""Finds a machine's libraries, GPUs and compilers. `Machine` is plain data, so it can be judged on another machine."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fp8rl.diagnose.report import installed_version
from fp8rl.numerics.backend.cuda_toolkit import installed
from fp8rl.numerics.backend.implementation import expandable_segments
from fp8rl.numerics.config import NumericsConfig
from fp8rl.rl.experiment.budget.job import Gpu
from fp8rl.rollout.deadlines import kill_family

LIBRARIES = (
    *("torch", "triton", "transformer_engine", "transformer_engine_torch", "megatron-core"),
    *("sglang", "sglang-kernel", "sgl-deep-gemm", "flashinfer-python", "transformers", "ray", "wandb"),
    "fp8rl-cpu-stubs",
)
"""Python packages on which a run's kernels and devices depend."""
PROBE = """
import json, sys
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.probe import allow_deepgemm, row_variant_ops
from fp8rl.trainer import device
from fp8rl.trainer.distributed import parallel
numerics = NumericsConfig.from_dict(json.loads(sys.argv[1]))
parallel.start(0, numerics)
here, kv = device.current(), numerics.kv_format
lacks = allow_deepgemm(here) if numerics.deepgemm else None
print(json.dumps([enable_compiler() if here == device.CPU else None, row_variant_ops(here, kv), lacks]))
"""
PROBE_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine has, for `judge`. Versions are texts, compilers are paths."""

    python: str
    system: str
    libraries: Mapping[str, str | None]
    """Version of each of LIBRARIES; None: not installed."""
    wanted: Mapping[str, str]
    """The versions that this release and its SGLang are written for, as specifiers (`==0.5.19`)."""
    gpus: tuple[Gpu, ...] = ()
    """All GPUs that the driver shows."""
    torch_sees: bool = False
    """Torch can use the GPUs."""
    torch_cuda: str | None = None
    """CUDA version that torch is built for; None: a CPU build."""
    driver: str | None = None
    driver_cuda: str | None = None
    """The newest CUDA version that NVIDIA's driver supports."""
    nvcc: str | None = None
    """The compiler of CUDA `torch_cuda`. SGLang compiles kernels with it at run time."""
    other_nvcc: str | None = None
    """CUDA compilers of any release; shown if none fits `torch_cuda`."""
    expandable_segments: str | None = None
    """The setting of torch's allocator that asks for expandable segments."""
    cc: str | None = None
    """The C compiler, which Triton's launchers are made with."""
    cxx: str | None = None
    """The C++ compiler, which torch.compile uses on a CPU."""
    compiles: bool | None = None
    """torch.compile works with the C++ compiler."""
    row_variant: tuple[str, ...] | None = ()
    """Ops that give a row other bits in another batch; None: the probe died, with `probe_error`."""
    probe_error: str = ""
    without_deepgemm: str | None = None
    """Why products cannot run on DeepGEMM although the spec asks for it. None: they can, or it does not ask."""
    probed: bool = True
    """A process has tried the ops. If False, the results of this trial count as good."""


def gather(numerics: NumericsConfig, say: Callable[[str], object], *, quick: bool = False) -> Machine:
    """Describe this machine. This takes about ten seconds, because a process starts like a trainer's and tries the ops.

    say: prints each step that begins. quick: do not start that process.
    """
    probe = None
    if not quick:
        say("testing the ops as a trainer would run them")
        command = [sys.executable, "-P", "-c", PROBE, json.dumps(numerics.to_dict())]
        # One thread, like a run's processes; that must be set before torch is loaded.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        probe = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    say("checking libraries, GPUs and compilers")
    torch_sees = torch.cuda.is_available()
    driver, gpus = _nvidia_smi()
    if torch_sees:
        seen = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        gpus = tuple(Gpu(each.name, (each.major, each.minor), each.total_memory) for each in seen)
    with suppress(ImportError):  # seconds that the checks need anyway, while the probe is at work
        from transformers import AutoTokenizer  # noqa: F401
    toolkits = list(installed()) if torch_sees else []
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        libraries={name: installed_version(name) for name in LIBRARIES},
        wanted=_specifiers("sglang") | _specifiers("fp8rl"),
        gpus=gpus,
        torch_sees=torch_sees,
        torch_cuda=torch.version.cuda,
        driver=driver,
        driver_cuda=_driver_cuda(),
        nvcc=next((str(each.nvcc) for each in toolkits if each.release == torch.version.cuda), None),
        other_nvcc=", ".join(f"{each.nvcc} of CUDA {each.release}" for each in toolkits) or None,
        expandable_segments=expandable_segments(),
        cc=shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang"),
        cxx=shutil.which(os.environ.get("CXX", "g++")),
        probed=not quick,
        **({} if probe is None else _answer(probe)),
    )


def _specifiers(distribution: str) -> dict[str, str]:
    """Read the versions of LIBRARIES that an installed distribution requires on any machine."""
    if installed_version(distribution) is None:
        return {}
    requirements = map(Requirement, importlib.metadata.requires(distribution) or [])
    asked = {canonicalize_name(r.name): str(r.specifier) for r in requirements if r.specifier}
    return {name: asked[canonicalize_name(name)] for name in LIBRARIES if canonicalize_name(name) in asked}


def _nvidia_smi() -> tuple[str | None, tuple[Gpu, ...]]:
    """Return the driver's version and its GPUs, even if torch cannot use them."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None, ()
    return parse_nvidia_smi(lines)


def parse_nvidia_smi(lines: list[str]) -> tuple[str | None, tuple[Gpu, ...]]:
    """Parse lines such as `580.95.05, NVIDIA H200, 143771, 9.0` (memory in MiB)."""
    rows = [[cell.strip() for cell in line.split(",")] for line in lines if line.count(",") == 3]
    gpus = []
    for _, name, mib, capability in rows:
        major, _, minor = capability.partition(".")
        if major.isdigit() and minor.isdigit():
            # A GPU that shares the machine's memory has `[N/A]` there.
            gpus.append(Gpu(name, (int(major), int(minor)), int(mib) << 20 if mib.isdigit() else 0))
    return (rows[0][0] if rows else None), tuple(gpus)


def _driver_cuda() -> str | None:
    try:
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _answer(probe: subprocess.Popen[str]) -> dict[str, Any]:
    """Read the probe's answer, as fields of `Machine`."""
    try:
        answered, complained = probe.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        kill_family(probe.pid)  # whose compilers hold its pipes
        probe.communicate()
        return {"row_variant": None, "probe_error": f"no answer within {PROBE_SECONDS} s"}
    if probe.returncode != 0:
        error = (complained.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        return {"row_variant": None, "probe_error": error}
    compiles, variant, without_deepgemm = json.loads(answered.splitlines()[-1])
    return {"compiles": compiles, "row_variant": tuple(variant), "without_deepgemm": without_deepgemm}
