"""The locks, the declared dependencies, the image, the stubs and the entry points, against what is installed here."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fp8rl.rl.record.trackers import TRACKERS
from fp8rl.rollout.engine.plugin.hooks import SGLANG_VERSION
from tests.support.paths import ROOT
from tests.test_architecture import imported_modules

DOCKERFILE = (ROOT / "requirements/Dockerfile").read_text()
PACKAGES = sorted(path.parent.name for path in ROOT.glob("fp8rl/*/__init__.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
OPTIONAL = PROJECT["optional-dependencies"]
DECLARED = {
    canonicalize_name(requirement.name): requirement
    for requirement in map(Requirement, PROJECT["dependencies"] + OPTIONAL["gpu"] + OPTIONAL["dev"])
}
# SGLang asks for CUDA kernels and for tools of other models, which the CPU install leaves out on purpose.
# TransformerEngine builds with CUDA only; its extras name distributions of their own.
NOT_CLOSED = {"sglang"}
CUDA_ONLY = {"transformer-engine"}
TE_PARTS = {"transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"}
# Where the two locks differ, and SGLang's pin that the index no longer has; requirements/gpu.txt says why.
OTHER_WITH_CUDA = {"numpy", "protobuf"}
GONE = {"cuda-tile"}
# torch and pydantic each bring these along at the one version that fits.
PINNED_BY_ANOTHER = {"triton", "pydantic-core", "sgl-deep-gemm"}
# Modules that only the CUDA install has, or has from another distribution, as they were found in one.
CUDA_MODULES = {
    "deep_gemm": ["sgl-deep-gemm"],
    "flashinfer": ["flashinfer-python"],
    "sgl_kernel": ["sglang-kernel"],
    "torchvision": ["torchvision"],
    "transformer_engine": ["transformer-engine"],
}

OWN = {"fp8rl", "fp8rl_certify", "examples", "lab", "tests"}  # without certify a sentence says so

cpu_install = pytest.mark.skipif(
    importlib.util.find_spec("fp8rl_cpu_stubs") is None, reason="the lock and the stubs belong to the CPU install"
)


def lock(*files: str) -> dict[str, str]:
    """Pinned version of each distribution in the files of requirements/ (cpu.txt), by canonical name."""
    versions: dict[str, str] = {}
    for file in files or ("cpu.txt",):
        for line in (ROOT / "requirements" / file).read_text().splitlines():
            if not line or line.startswith("#"):
                continue
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)", line)
            assert match, f"requirements/{file}: {line!r} is not NAME==VERSION"
            name = canonicalize_name(match[1])
            assert name not in versions, f"requirements/{file}: {name} stands twice"
            versions[name] = match[2]
    return versions


def gpu_lock() -> dict[str, str]:
    return lock("gpu.txt", "gpu_source.txt")


def required_by(distribution: str, extras: frozenset[str] = frozenset()) -> list[Requirement]:
    """Requirements of an installed distribution that hold on this machine, with those of the given extras."""
    requirements = [Requirement(line) for line in importlib.metadata.requires(distribution) or []]
    environments = [{"extra": extra} for extra in extras or {""}]
    return [r for r in requirements if r.marker is None or any(r.marker.evaluate(e) for e in environments)]


@cpu_install
def test_lock_is_what_is_installed() -> None:
    # In a process of its own: setuptools, once a test has imported it, puts copies of other distributions on the path.
    script = "from importlib.metadata import distributions as d; print([(x.metadata['Name'], x.version) for x in d()])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    installed = {canonicalize_name(name): version.partition("+")[0] for name, version in ast.literal_eval(found)}
    wrong = {name: (version, installed.get(name)) for name, version in lock().items() if installed.get(name) != version}
    assert not wrong, f"(locked, installed): {wrong}. Run `make install`"


def unsatisfied(locked: dict[str, str], names: Iterable[str]) -> dict[str, str]:
    """What these distributions require and the lock lacks, or has at another version: by whom, by name."""
    extras = {canonicalize_name(r.name): frozenset(r.extras) for r in DECLARED.values()}
    return {
        required: f"{name} requires {requirement}"
        for name in names
        for requirement in required_by(name, extras.get(name, frozenset()))
        for required in [canonicalize_name(requirement.name)]
        if required not in locked or not requirement.specifier.contains(locked[required], prereleases=True)
    }


@cpu_install
def test_locks_are_complete() -> None:
    """That for GPUs as far as the CPU install has the same distributions; all of it was resolved when it was made."""
    assert unsatisfied(lock(), lock().keys() - NOT_CLOSED) == {}
    assert unsatisfied(lock(), NOT_CLOSED).keys().isdisjoint(lock()), "what SGLang asks for and is there fits"
    missing = unsatisfied(gpu_lock(), gpu_lock().keys() & lock().keys())
    assert missing.keys() == GONE, missing


def test_locks_satisfy_the_declared_dependencies() -> None:
    for locked, elsewhere in ((lock(), CUDA_ONLY), (gpu_lock(), set[str]())):
        for name in DECLARED.keys() - elsewhere:
            assert DECLARED[name].specifier.contains(locked[name]), f"{DECLARED[name]} is declared, {locked[name]} not"


def test_locks_fit_each_other() -> None:
    """All of TransformerEngine has one version (`core` alone is built for CUDA 12), and SGLang is the hooks'."""
    cpu, gpu = lock(), gpu_lock()
    assert DECLARED["transformer-engine"].extras == {"core_cu13", "pytorch"}
    assert {gpu[part] for part in TE_PARTS} == {gpu["transformer-engine"]}
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == OTHER_WITH_CUDA
    assert cpu["sglang"] == SGLANG_VERSION


@pytest.mark.slow
def test_gpu_lock_has_what_the_gpu_path_imports() -> None:
    """As the product and its bench import it; what SGLang and Megatron load there was seen in an install."""
    locked, distributions = gpu_lock(), importlib.metadata.packages_distributions() | CUDA_MODULES
    sources = [path.read_text() for folder in ("fp8rl", "certify", "lab") for path in (ROOT / folder).rglob("*.py")]
    imported = set().union(*map(top_level_imports, sources)) - OWN - set(sys.stdlib_module_names)
    missing = {
        module
        for module in imported
        if not {canonicalize_name(name) for name in distributions.get(module, [module])} & locked.keys()
    }
    assert missing == TRACKERS.keys() - {"wandb"}, "each is an extra of its own"
    assert missing <= OPTIONAL.keys()


def test_image_has_the_cuda_release_of_its_torch_and_installs_the_gpu_lock_and_nothing_else() -> None:
    (image,) = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu24\.04$", DOCKERFILE, re.MULTILINE)
    assert gpu_lock()["cuda-toolkit"].startswith(f"{image}.")
    assert f"nvidia-cudnn-cu{image.partition('.')[0]}" in gpu_lock()
    assert re.findall(r"pip install (.+)", DOCKERFILE) == ["--no-deps --no-build-isolation -e . -e ./certify"]
    make = ["make", "--always-make", "--dry-run", "gpu-libraries"]
    steps = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"pip install .*-r (\S+)", steps) == ["requirements/gpu.txt", "requirements/gpu_source.txt"]
    assert steps.count("pip install") == steps.count("--no-deps") == 2
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1] == "fp8rl"


@pytest.mark.slow
def test_every_import_is_a_declared_dependency() -> None:
    distributions = importlib.metadata.packages_distributions()
    runtime = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"] + OPTIONAL["gpu"]}
    undeclared = []
    for path in sorted((ROOT / "fp8rl").rglob("*.py")):
        for module in top_level_imports(path.read_text()) - OWN - set(sys.stdlib_module_names):
            names = {canonicalize_name(name) for name in distributions.get(module, CUDA_MODULES.get(module, [module]))}
            # The one file for a tracker's or an environment's package is of no use without that extra.
            extra = path.stem.removeprefix("to_") == module and module in OPTIONAL
            if not names & (runtime | PINNED_BY_ANOTHER) and not extra:
                undeclared.append(f"{path.relative_to(ROOT)}: {module}")
    assert not undeclared, undeclared


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of a copy of the checkout, as a build writes beside what it builds."""
    copy, out = tmp_path_factory.mktemp("copy") / "fp8rl", tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "docs", "lab", "runs", "tests", "wandb"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    for link in (path for path in copy.iterdir() if path.is_symlink()):
        link.unlink()  # the links at the top are for readers
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, copy], check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    shutil.unpack_archive(built, out / "unpacked", "zip")
    return out / "unpacked"


@pytest.mark.slow
def test_the_wheel_has_one_package_with_every_file(wheel: Path) -> None:
    names = {path.name for path in wheel.iterdir()}
    assert names == {"fp8rl", f"fp8rl-{PROJECT['version']}.dist-info"}
    modules = {path.relative_to(wheel / "fp8rl") for path in wheel.rglob("*.py")} - {Path("examples/first/reward.py")}
    assert modules == {path.relative_to(ROOT / "fp8rl") for path in (ROOT / "fp8rl").rglob("*.py")}
    others = {path.relative_to(ROOT / "fp8rl") for path in (ROOT / "fp8rl").rglob("*") if path.is_file()}
    others = {path for path in others - modules if path.suffix != ".pyc"}
    assert all((wheel / "fp8rl" / path).is_file() for path in others), "package-data names what is not Python"


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["checkout", "wheel"])
def test_folders_of_a_user_s_with_our_names_are_not_in_the_way(installed: str, wheel: Path, tmp_path: Path) -> None:
    for package in (*PACKAGES, "lab", "bench", "studies"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('a folder of the user')")
    imports = "; ".join(f"import fp8rl.{package} as {package}" for package in PACKAGES)
    code = (
        f"import os, sys; sys.path[1:1] = {[str(wheel)] if installed == 'wheel' else []}; {imports}; "
        "from fp8rl import Problem, TokenBatch, train; from fp8rl.cli import main; print(models.__file__); main()"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    where = wheel if installed == "wheel" else ROOT
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(where / "fp8rl/models/__init__.py")) and "certify" in done.stdout


@pytest.mark.slow
@cpu_install
def test_stub_refuses_cuda(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    code = "import torch; torch.cuda.is_available = lambda: True\nimport sgl_kernel"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert "ImportError" in result.stderr and "pip uninstall fp8rl-cpu-stubs" in result.stderr


@cpu_install
def test_stub_names_import_and_raise_when_called() -> None:
    from sgl_kernel.mamba import causal_conv1d_fn_cpu
    from torchvision.transforms.v2.functional import resize

    gating = torch.ops.sgl_kernel.fused_gdn_gating_cpu
    for function, name in (
        (causal_conv1d_fn_cpu, "sgl_kernel.mamba.causal_conv1d_fn_cpu"),
        (gating, "torch.ops.sgl_kernel.fused_gdn_gating_cpu"),
        (resize, "torchvision.transforms.v2.functional.resize"),
    ):
        with pytest.raises(NotImplementedError, match=re.escape(name)):
            function()


def top_level_imports(source: str) -> set[str]:
    return {module.split(".")[0] for _, module in imported_modules(source)}
