"""Finds the CUDA toolkit with which SGLang, DeepGEMM and TVM build kernels at run time.

The compiler must be of the CUDA release that torch is built for; the headers of CCCL refuse any other. A system's
toolkit of this release is used as it is. Otherwise the compiler from NVIDIA's wheels is used. Its directory has another
layout than these libraries expect (`lib` in place of `lib64`, no `libcudart.so`), so `view` makes a directory of links.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_SYSTEM = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Toolkit:
    """One installed compiler."""

    home: Path
    """The directory that has `bin/nvcc`."""
    release: str
    """The CUDA release, such as 13.0."""
    wheel: bool = False
    """True if the compiler came as a wheel, and is used through a `view`."""

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"


def use_toolkit() -> None:
    """Set CUDA_HOME to the toolkit that fits, for this process and its child processes.

    Nothing changes if no toolkit fits. `fp8rl doctor` reports that.
    """
    if (toolkit := fitting(torch.version.cuda)) is not None:
        os.environ["CUDA_HOME"] = str(view(toolkit) if toolkit.wheel else toolkit.home)


def fitting(cuda: str | None) -> Toolkit | None:
    """Return the first installed toolkit of a CUDA release. Return None if there is none."""
    return next((toolkit for toolkit in installed() if toolkit.release == cuda), None)


def other_compilers(cuda: str | None) -> str | None:
    """Return None if a compiler of this CUDA release is installed; otherwise the installed compilers, or `none`."""
    found = list(installed())
    if any(toolkit.release == cuda for toolkit in found):
        return None
    return ", ".join(f"{toolkit.nvcc} of CUDA {toolkit.release}" for toolkit in found) or "none"


def installed() -> Iterator[Toolkit]:
    """Yield all toolkits: from CUDA_HOME and CUDA_PATH, from PATH, from /usr/local/cuda, and from the wheels."""
    named = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = [Path(found).resolve().parent.parent] if (found := shutil.which("nvcc")) else []
    for home in dict.fromkeys([*named, *on_path, _SYSTEM]):
        if release := _release(home):
            yield Toolkit(home, release)
    if (of_wheel := _wheel_home()) is not None and (release := _release(of_wheel)):
        yield Toolkit(of_wheel, release, wheel=True)


def view(toolkit: Toolkit, parent: Path | None = None) -> Path:
    """Return a directory of links to a wheel's files, in the layout of a system's toolkit. Make it if it is missing.

    parent: the directory to make it in; None: the user's cache. It is never removed, because builds keep its path.
    """
    parent = parent or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8rl"
    place = parent / f"cuda-{toolkit.release}-{hashlib.sha256(str(toolkit.home).encode()).hexdigest()[:8]}"
    if place.exists():
        return place
    parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=parent))
    for name in ("bin", "include", "nvvm"):
        (new / name).symlink_to(toolkit.home / name)
    (new / "lib64").mkdir()
    for library in (toolkit.home / "lib").iterdir():
        (new / "lib64" / library.name).symlink_to(library)
        if unversioned := re.fullmatch(r"(lib\w+\.so)\.\d+", library.name):
            (new / "lib64" / unversioned[1]).symlink_to(library)
    (new / "lib").symlink_to("lib64")
    with contextlib.suppress(OSError):  # another process was first
        new.rename(place)
    shutil.rmtree(new, ignore_errors=True)
    return place


def _release(home: Path) -> str | None:
    """Ask a toolkit's compiler for its release. Return None if no compiler starts, or CUDA's headers are missing."""
    if not (home / "include" / "cuda_runtime.h").is_file():
        return None
    try:
        output = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+\.\d+)", output)
    return release[1] if release else None


def _wheel_home() -> Path | None:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    nvcc = next((file for file in files if file.parts[-2:] == ("bin", "nvcc")), None)
    return None if nvcc is None else Path(str(nvcc.locate())).parent.parent
