import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fp8rl.numerics.backend import cuda_toolkit
from fp8rl.numerics.backend.cuda_toolkit import Toolkit, fitting, installed, other_compilers, use_toolkit, view

SOURCE = """
#include <cub/cub.cuh>
#include <cuda/std/limits>
__global__ void largest(float* x) { x[0] = cuda::std::numeric_limits<float>::max(); }
int main() { largest<<<1, 1>>>(nullptr); return cudaDeviceSynchronize() == cudaSuccess; }
"""


def toolkit(home: Path, release: str) -> Path:
    """A toolkit whose compiler says its release, and has nothing else."""
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(0o755)
    return home


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No toolkit anywhere; the user's cache is a folder of the test."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_toolkit, "_SYSTEM", tmp_path / "none")
    return monkeypatch


def test_the_first_toolkit_of_the_release_is_taken(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert fitting("13.0") is None and other_compilers("13.0") == "none"
    old, system = toolkit(tmp_path / "old", "12.4"), toolkit(tmp_path / "system", "13.0")
    wheel = toolkit(tmp_path / "wheel", "13.0")
    bare.setenv("CUDA_HOME", str(old))
    bare.setattr(cuda_toolkit, "_wheel_home", lambda: wheel)
    assert fitting("13.0") == Toolkit(wheel, "13.0", wheel=True)
    bare.setattr(cuda_toolkit, "_SYSTEM", system)
    assert fitting("13.0") == Toolkit(system, "13.0") and fitting("12.4") == Toolkit(old, "12.4")
    assert [each.release for each in installed()] == ["12.4", "13.0", "13.0"]
    assert other_compilers("13.0") is None and str(other_compilers("12.9")).startswith(f"{old}/bin/nvcc of CUDA 12.4, ")
    (system / "include" / "cuda_runtime.h").unlink()
    assert fitting("13.0") == Toolkit(wheel, "13.0", wheel=True), "a compiler without its headers is no toolkit"


def test_a_wheels_compiler_is_named_to_what_builds_kernels(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = toolkit(tmp_path / "wheel", "13.0")
    for name in ("nvvm", "lib"):
        (wheel / name).mkdir()
    (wheel / "lib" / "libcudart.so.13").touch()
    bare.setattr(cuda_toolkit, "_wheel_home", lambda: wheel)
    bare.setattr("torch.version.cuda", "12.8")
    use_toolkit()
    assert "CUDA_HOME" not in os.environ, "another release's"
    bare.setattr("torch.version.cuda", "13.0")
    bare.setenv("CUDA_HOME", "/usr/local/cuda-12.4")
    use_toolkit()
    home = Path(os.environ["CUDA_HOME"])
    assert home.parent == tmp_path / "cache" / "fp8rl" and (home / "bin" / "nvcc").is_file()
    assert (home / "lib64" / "libcudart.so").is_file() and (home / "lib" / "libcudart.so.13").is_file()
    use_toolkit()
    assert os.environ["CUDA_HOME"] == str(home), "its own view is no system's toolkit of another kind"
    assert list(home.parent.iterdir()) == [home]


@pytest.mark.slow
@pytest.mark.skipif(not any(installed()), reason="no CUDA compiler on this machine")
def test_a_source_with_cccl_is_compiled_and_linked_through_a_view(tmp_path: Path) -> None:
    system = next(installed())
    (tmp_path / "wheel" / "lib").mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (tmp_path / "wheel" / name).symlink_to(system.home / name)
    runtime = next((system.home / "lib64").glob("libcudart.so.[0-9]*"))
    major = runtime.name.split(".")[2]
    (tmp_path / "wheel" / "lib" / f"libcudart.so.{major}").symlink_to(runtime)
    home = view(Toolkit(tmp_path / "wheel", system.release, wheel=True), tmp_path / "views")
    (tmp_path / "x.cu").write_text(SOURCE)
    compiler = [home / "bin" / "nvcc", "-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "-c", "x.cu", "-o", "x.o"]
    subprocess.run(compiler, cwd=tmp_path, check=True)
    linker = [shutil.which("g++") or "c++", "x.o", f"-L{home}/lib64", "-lcudart", "-o", "x"]  # as TVM's builder links
    subprocess.run(linker, cwd=tmp_path, check=True)
