"""Pack what the two calls of `lab/bench/gpu/fifteen` carry to a machine without a network.

    python -m lab.bench.gpu.fifteen.pack .fifteen --binding WHEEL --python PYTHON

The machine has an image with Python 3.12, torch 2.11.0+cu130, Triton 3.6.0 and what stands in `image.txt`. The folder
gets a folder for each call, with archives, and `stand_ins/` for packages that SGLang imports and exact mode never
calls. Wheels are downloaded into FOLDER/wheels, once. A call and the tracked tree must be below LIMIT_MB together.

WHEEL is `transformer_engine_torch`, compiled against that torch: without it the native sides are left out. PYTHON has
that torch and Triton, and compiles the kernels for sm_90: without it the machine compiles them.
"""

from __future__ import annotations

import argparse
import configparser
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from lab.bench.gpu import stand_ins
from lab.bench.gpu.fifteen.fat import only
from lab.bench.gpu.fifteen.needed import NOT_NEEDED

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[3]
LIMIT_MB = 66.0
FOR_TORCH_2_11 = "sglang-kernel==0.4.5"
COMMON_OPS = "sgl_kernel/sm90/common_ops.abi3.so"
"""Of that release: the pinned one's has symbols of torch 2.13."""
TE_LIBRARY = "libtransformer_engine.so"
GPU = {
    "torch-memory-saver",
    "sgl-deep-gemm",
    "sglang-kernel",
    "transformer-engine-cu13",
    "nvdlfw-inspect",
    "importlib-metadata",
}
"""What is taken of requirements/gpu.txt beside all of cpu.txt."""
EXTRA = ["transformer_engine==2.20.2"]
NEWER_THERE = {"transformers", "tokenizers"}
"""The image has them in versions that the pinned SGLang does not take."""
UNCALLED = {
    *("ruff", "mypy", "virtualenv", "python-discovery", "types-pyyaml", "ast-serialize", "librt", "py-spy", "distlib"),
    *("jedi", "parso", "pexpect", "ptyprocess", "stack-data", "executing", "asttokens", "pure-eval"),
    *("soundfile", "zstandard", "cryptography", "gymnasium", "farama-notifications", "xgrammar", "plotly", "cwevals"),
    *("ipython", "matplotlib-inline", "ipython-pygments-lexers", "prompt-toolkit", "traitlets", "wcwidth"),
}
STAND_INS = {"flashinfer", "flash_attn", "tilelang", "quack", "humming", "deep_ep", "xgrammar", "soundfile"}
CALLED = {
    "plotly/offline.py": "def get_plotlyjs():\n    return ''\n",  # the charts of a page that stays on the machine
    "IPython/__init__.py": "def get_ipython():\n    return None\n",
    "IPython/display.py": "HTML = display = None\n",
}
"""Stand-ins of which a call is answered."""
PLATFORMS = [f"manylinux_2_{glibc}_x86_64" for glibc in (39, 36, 35, 34, 31, 28, 27, 26, 24, 17, 5)]
MODELS = (
    *("auto", "clip", "glm4v", "glm4v_moe", "glmasr", "llama", "llama4", "llava", "mistral3", "mllama", "parakeet"),
    *("pixtral", "qwen2", "qwen2_5_vl", "qwen2_audio", "siglip", "vitdet", "whisper", "qwen3", "qwen3_moe"),
)
"""Of transformers: those whose modules SGLang's server and Megatron import."""
LEFT_OUT = re.compile(
    r"\.(a|map|pyi|jar|ipynb)$|(^|/)tests?/|\.data/(headers|data)/|/licenses/|^(?!transformer_engine).*/RECORD$"
    r"|^ray/(jars|rllib|cpp|dashboard/client|llm|serve|train|tune)/|^wandb/bin/"
    r"|^sgl_kernel/(sm100/|flash_ops|flashmla_ops|spatial_ops|infllm_ops)|^transformer_engine/jax/"
    r"|^sglang/(multimodal_gen|test|benchmark|eval|srt/rust_extensions)/"
    r"|^tvm_ffi/(3rdparty|src|lib/libtvm_ffi_testing|include)|_cu12\.abi3\.so$"
    rf"|^transformers/models/(?!({'|'.join(MODELS)})/)[^/]+/(modeling|modular|convert)_"
)
STAGES = re.compile(r"\.(source|ttir|ttgir|llir|ptx)$")
"""Files of a Triton cache that no launch needs: what a kernel was before it was a cubin."""
CALLS = {1: ("te", "deepgemm", "trainer", "kernels"), 2: ("engine", "ray", "trainer", "kernels")}
"""The archives that each carries."""
HOMES = {
    "ray": ("ray",),
    "te": ("transformer_engine", "transformer_engine_torch", "transformer_engine_cu13", "nvdlfw_inspect"),
    "deepgemm": ("deep_gemm",),
    "trainer": ("megatron", "transformers", "tokenizers", "pydantic", "pydantic_core", "annotated_types",
                "typing_inspection", "omegaconf", "antlr4", "fp8rl", "importlib_metadata", "tvm_ffi"),
}  # fmt: skip
"""Top-level folders of the archives; all others are in `engine`."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.gpu.fifteen.pack", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--binding", type=Path, help="wheel of transformer_engine_torch")
    parser.add_argument("--python", type=Path, help="a Python with the machine's torch and Triton")
    parser.add_argument("--again", nargs="*", default=[], help="archives to pack anew; else those that are missing")
    given = parser.parse_args()
    folder: Path = given.folder.resolve()
    packed, site = folder / "packed", folder / "site"
    packed.mkdir(parents=True, exist_ok=True)
    for name in given.again:
        (packed / f"{name}.tar.xz").unlink(missing_ok=True)
    download(folder / "wheels")
    shutil.rmtree(site, ignore_errors=True)
    wheels = [*sorted((folder / "wheels").glob("*.whl")), *([given.binding] if given.binding else [])]
    with_te = given.binding is not None and not (packed / "te.tar.xz").exists()
    for wheel in wheels:
        if with_te or not wheel.name.startswith("transformer_engine_cu13"):
            unpack(wheel, site)
    describe(site)
    members = members_of(site)
    if not given.binding:
        del members["te"]
    if given.python:
        (compiled := folder / "kernels").mkdir(exist_ok=True)
        command = [str(given.python), "-m", "lab.bench.gpu.fifteen.kernels", str(compiled)]
        subprocess.run(command, check=True, env={"PYTHONPATH": f"{CHECKOUT}:{site}", "PATH": "/usr/bin:/bin"})
        members["kernels"] = sorted(compiled.iterdir())
    for name, paths in members.items():
        if not (target := packed / f"{name}.tar.xz").exists():
            pack(target, paths)
    return 0 if lay_out(folder, packed) else 1


def download(wheels: Path) -> None:
    """Wheels of the pinned versions for Python 3.12; sglang-kernel's two in a request each."""
    there = {_name(line) for line in (HERE / "image.txt").read_text().splitlines()} - NEWER_THERE
    pins = [line for line in _pins("cpu") if _name(line) not in there | UNCALLED]
    pins += [line for line in _pins("gpu") if _name(line) in GPU] + EXTRA
    for names in (pins, [FOR_TORCH_2_11]):
        wanted = [each for each in names if not _has(wheels, each)]
        if not wanted:
            continue
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
                *("--python-version", "3.12", "--implementation", "cp", "--dest", str(wheels)),
                *(part for platform in PLATFORMS for part in ("--platform", platform)),
                *("--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"),
                *wanted,
            ],
            check=True,
        )


def _pins(name: str) -> list[str]:
    lines = (CHECKOUT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if re.match(r"[A-Za-z]", line)]


def _name(line: str) -> str:
    return re.split("==", line)[0].lower().replace("_", "-")


def _has(wheels: Path, pin: str) -> bool:
    name, _, version = pin.partition("==")
    stems = [path.name.lower().split("-")[:2] for path in wheels.glob("*.whl")]
    return [re.sub("[-.]", "_", name.lower()), version] in [[re.sub("[-.]", "_", a), b] for a, b in stems]


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
    """Unpack what is needed of a wheel; libraries lose their symbols' names, and TransformerEngine's other GPUs."""
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
            content = files.read(each)
            path.write_bytes(only(content, {90}) if path.name == TE_LIBRARY else content)
            program = bool(each.external_attr >> 16 & 0o111)
            path.chmod(0o755 if program else 0o644)
            if len(content) > 1 << 16 and content[:4] == b"\x7fELF":
                subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)


def members_of(site: Path) -> dict[str, list[Path]]:
    """The top-level folders and files of each archive."""
    homes = {name: archive for archive, names in HOMES.items() for name in names}
    found: dict[str, list[Path]] = {name: [] for name in (*HOMES, "engine")}
    for path in sorted(site.iterdir()):
        package = re.sub(r"-[^-]*\.dist-info$", "", path.name).lower().removesuffix(".py")
        found[homes.get(package, "engine")].append(path)
    return found


def pack(target: Path, members: Iterable[Path]) -> None:
    part = target.with_suffix(".part")
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    with lzma.open(part, "wb", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for member in members:
            archive.add(member, member.name, filter=lambda file: None if STAGES.search(file.name) else file)
    part.rename(target)


def lay_out(folder: Path, packed: Path) -> bool:
    """A folder for each call; say what travels, and whether that is little enough."""
    tree = _tracked()
    lean = {path: size for path, size in tree.items() if not any(_below(path, each) for each in NOT_NEEDED)}
    weights = Counter[str]()
    for path, size in tree.items():
        weights["/".join(path.split("/")[:2])] += size
    print(f"tracked tree: {sum(tree.values()) / 1e6:.1f} MB, of which calls need {sum(lean.values()) / 1e6:.1f}")
    print("  heaviest: " + ", ".join(f"{name} {size / 1e6:.1f}" for name, size in weights.most_common(6)))
    fits = True
    for call, names in CALLS.items():
        carried = folder / str(call)
        shutil.rmtree(carried, ignore_errors=True)
        (carried / "stand_ins").mkdir(parents=True)
        put = f"\n\nput({sorted(STAND_INS)}, refuse)\n"
        (carried / "stand_ins" / "sitecustomize.py").write_text(Path(stand_ins.__file__).read_text() + put)
        for name, text in CALLED.items():
            (carried / "stand_ins" / name).parent.mkdir(exist_ok=True)
            (carried / "stand_ins" / name).write_text(text)
        sizes = {}
        for name in names:
            if (archive := packed / f"{name}.tar.xz").exists():
                (carried / archive.name).hardlink_to(archive)
                sizes[name] = archive.stat().st_size
        total = sum(sizes.values()) / 1e6
        each = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sizes.items())
        whole, needed = (total + sum(files.values()) / 1e6 for files in (tree, lean))
        fits &= min(whole, needed) <= LIMIT_MB
        print(
            f"call {call}: {each} = {total:.1f} MB; with the tree {whole:.1f}, with what calls need of it {needed:.1f}"
        )
    print(
        f"limit: {LIMIT_MB:.0f} MB. What calls do not need of the tree is left behind by a commit that is undone later:"
    )
    print(f"  git switch --detach && git rm -rq {' '.join(NOT_NEEDED)} && git commit -qm lean; ...; git switch -")
    return fits


def _tracked() -> dict[str, int]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    paths = [CHECKOUT / name for name in listed.split("\0") if name]
    return {str(path.relative_to(CHECKOUT)): path.stat().st_size for path in paths if path.is_file()}


def _below(path: str, pattern: str) -> bool:
    return Path(path).match(pattern) or path.startswith(pattern + "/")


if __name__ == "__main__":
    sys.exit(main())
