"""Pack the GPU install for a machine without a network: `python -m lab.bench.gpu.carry FOLDER`.

For Python 3.12, torch 2.11.0+cu130 and Triton 3.6.0, as an image with torch may have them. FOLDER gets archives, to be
unpacked into one directory of the machine's PYTHONPATH, and `stand_ins/`, a directory to be named before it: SGLang
imports packages on CUDA that exact mode never calls, and that take a gigabyte. Set SGLANG_IS_FLASHINFER_AVAILABLE=false
and, if the machine is small, carry a Triton cache that `fp8rl warm FILE --gpu h100` filled under the same Triton.
"""

from __future__ import annotations

import argparse
import configparser
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from lab.bench.gpu import stand_ins

CHECKOUT = Path(__file__).parents[3]
THERE = re.compile(
    r"(torch|triton|numpy|scipy|pandas|pyarrow|pillow|sympy|networkx|matplotlib|kiwisolver|fonttools|uvloop|setuptools)=="
)
"""What the image has."""
ASIDE = re.compile(r"(ruff|mypy.*|virtualenv|wheel|types-PyYAML|ast_serialize|librt|py-spy)==")
GPU = re.compile(r"(torch-memory-saver|sgl-deep-gemm|sglang-kernel)==")
"""What engines need of requirements/gpu.txt beside."""
FOR_TORCH_2_11 = "sglang-kernel==0.4.5"
COMMON_OPS = "sgl_kernel/sm90/common_ops.abi3.so"
"""Of that release: the pinned one's has symbols of torch 2.13."""
PLATFORMS = [f"manylinux_2_{glibc}_x86_64" for glibc in (39, 36, 35, 34, 31, 28, 27, 26, 24, 17, 5)]
LEFT_OUT = re.compile(
    r"\.(a|map|pyi)$|^ray/(jars|rllib|cpp|dashboard/client)/|^wandb/bin/"
    r"|^sgl_kernel/(sm100/|flash_ops|flashmla_ops|spatial_ops|infllm_ops)|\.data/(headers|data)/"
)
ARCHIVES = {"ray": ("ray",), "engine": ("sglang", "xgrammar", "plotly", "grpc", "sgl_kernel", "cryptography", "openai")}
"""Top-level folders of two archives; all others are in a third, `libraries`."""
STAND_INS = {"flashinfer", "flash_attn", "tilelang", "quack", "humming", "deep_ep"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.gpu.carry", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    (folder / "stand_ins").mkdir(parents=True, exist_ok=True)
    put = f"\n\nput({sorted(STAND_INS)}, refuse)\n"
    (folder / "stand_ins" / "sitecustomize.py").write_text(Path(stand_ins.__file__).read_text() + put)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch, "wheels"), Path(scratch, "site")
        download(wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, site)
        describe(site)
        for name, members in members_of(site).items():
            with tarfile.open(folder / f"{name}.tar.xz", "w:xz", preset=6) as archive:
                for member in members:
                    archive.add(member, member.name)
            print(f"{name}.tar.xz: {(folder / f'{name}.tar.xz').stat().st_size / 1e6:.0f} MB")


def download(wheels: Path) -> None:
    """Wheels of the pinned versions for Python 3.12, sglang-kernel's two in a request each."""
    wanted = [line for line in _pins("cpu") if not THERE.match(line) and not ASIDE.match(line)]
    for names in ([*wanted, *filter(GPU.match, _pins("gpu"))], [FOR_TORCH_2_11]):
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
                *("--python-version", "3.12", "--implementation", "cp", "--dest", str(wheels)),
                *(part for platform in PLATFORMS for part in ("--platform", platform)),
                *("--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"),
                *names,
            ],
            check=True,
        )


def _pins(name: str) -> list[str]:
    lines = (CHECKOUT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if re.match(r"[A-Za-z]", line)]


def describe(site: Path) -> None:
    """Write what an install of this checkout would: without it SGLang does not find the plugin."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = configparser.ConfigParser(delimiters=("=",))
    groups.read_dict(project["entry-points"])
    with (info / "entry_points.txt").open("w") as file:
        groups.write(file)


def unpack(wheel: Path, site: Path) -> None:
    """Unpack what is needed of a wheel; libraries lose their symbols' names."""
    older = wheel.name.startswith(FOR_TORCH_2_11.replace("-", "_").replace("==", "-") + "-")
    with zipfile.ZipFile(wheel) as files:
        for each in files.infolist():
            name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", each.filename)
            name = re.sub(r"^[^/]+\.data/scripts/", "bin/", name)
            other = wheel.name.startswith("sglang_kernel-") and (name == COMMON_OPS) != older
            if each.is_dir() or LEFT_OUT.search(name) or other:
                continue
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files.read(each))
            program = bool(each.external_attr >> 16 & 0o111)
            path.chmod(0o755 if program else 0o644)
            if path.stat().st_size > 1 << 20 and path.read_bytes()[:4] == b"\x7fELF":
                subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)


def members_of(site: Path) -> dict[str, list[Path]]:
    """The top-level folders and files of each archive."""
    homes = {name: archive for archive, names in ARCHIVES.items() for name in names}
    found: dict[str, list[Path]] = {name: [] for name in (*ARCHIVES, "libraries")}
    for path in sorted(site.iterdir()):
        found[homes.get(path.name, "libraries")].append(path)
    return found


if __name__ == "__main__":
    main()
