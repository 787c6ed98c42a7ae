"""The import rule: between packages, and between the floors inside `rl`, an import never points up or sideways."""

import ast
import re
import sys
from collections.abc import Callable, Collection, Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

MAY_IMPORT = {
    "numerics": set(),
    "models": {"numerics"},
    "rollout": {"numerics", "models"},
    "trainer": {"numerics", "models"},
    "weight_sync": {"numerics", "models", "rollout", "trainer"},
    "rl": {"numerics", "models", "rollout", "trainer", "weight_sync"},
    "diagnose": {"numerics", "models", "rollout", "trainer", "weight_sync", "rl"},
    "fp8rl": {"numerics", "models", "rollout", "trainer", "weight_sync", "rl", "diagnose", "lab"},
}
"""By the folder in fp8rl/; `fp8rl` is what lies there beside them. `lab` may import them all, and the command `study`
imports it."""
NUMERICS_THIRD_PARTY = {"torch", "triton"}
FAMILIES = ("models.families", "trainer.modules.native")
FAMILY_FOLDERS = {ROOT / "fp8rl" / home.replace(".", "/") for home in ("models.architectures", *FAMILIES)}
KNOW_A_FAMILY = {
    "fp8rl/models/sizes.py": "the numbers that several architectures read; sizes of one family are `ModelSizes.own`",
    "fp8rl/numerics/ops/__init__.py": "lists the names of all ops",
    "fp8rl/numerics/kernels/attention/forward.py": "one kernel attends over keys with and without their values in them",
    "fp8rl/rollout/engine/plugin/state.py": "SGLang's names of its buffers",
    "fp8rl/trainer/modules/host.py": "calls these ops over the trainer's rows",
    "fp8rl/trainer/megatron/patches.py": "the name of a module of Megatron's",
    "fp8rl/rollout/engine/plugin/tokens.py": "attends over keys with and without their values in them",
    "fp8rl/rollout/engine/plugin/native.py": "what SGLang's own models lack",
}
"""Files outside the families' folders that name one, and why."""
FLOORS = ("mismatch", "record", "algorithms", "experiment", "guard", "report", "run", "loop")
"""Of `rl`, from the bottom up."""


def broken(files: Iterable[Path], forbidden: Callable[[str], bool]) -> list[str]:
    """The imports that are forbidden, by their module."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files
        for line, module in imported_modules(path.read_text())
        if forbidden(module)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_follow_the_rule(package: str) -> None:
    forbidden = (MAY_IMPORT.keys() | {"lab", "tests"}) - MAY_IMPORT[package] - {package}
    assert not broken(files_of(package), lambda module: package_of(module) in forbidden)


@pytest.mark.slow
def test_everything_is_imported_below_fp8rl() -> None:
    """A folder at the top of the repository is no package of its own: a user may have one of that name."""
    files = [path for folder in ("fp8rl", "lab", "tests", "examples") for path in python_files(folder)]
    tops = MAY_IMPORT.keys() - {"fp8rl"} | {"studies", "bench"}
    assert not broken(files, lambda module: module.split(".")[0] in tops)


def test_numerics_imports_only_torch_and_the_standard_library() -> None:
    """But for the base class of all sections of a spec, which every package above has some of, and a library
    whose products stand in for ours."""
    allowed = NUMERICS_THIRD_PARTY | set(sys.stdlib_module_names) | {"fp8rl"}
    found = broken(files_of("numerics"), lambda module: module.split(".")[0] not in allowed)
    assert sorted({each.split(":")[0] + each.partition(" imports")[2].split(".")[0] for each in found}) == [
        "fp8rl/numerics/core/section.py pydantic",
        "fp8rl/numerics/kernels/products/deepgemm.py deep_gemm",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(MAY_IMPORT.keys() - {"models"}))
def test_only_models_knows_the_name_of_a_tensor(package: str) -> None:
    names = r"model\.layers|self_attn|embed_tokens|lm_head\.|layernorm\.weight|mlp\.\w+_proj|w13_weight|w2_weight"
    trees = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in files_of(package)}
    found = [(path, node.value) for path, tree in trees.items() for node in strings(tree)]
    assert not [(path, text) for path, text in found if re.search(names, text)]


def test_no_file_outside_the_families_folders_knows_a_family() -> None:
    """A family of ops is a file on each floor; tables, builders, checks and formats are loops over them."""
    names = {path.stem for path in python_files("fp8rl/models/families")} - {"__init__"}
    assert len(names) >= 3
    of_one = {f"fp8rl.{home}.{name}" for home in FAMILIES for name in (*names, "experts")}
    named = re.compile(r"latent|\b(?:sigmoid_router|head_norms|qkv_bias)\b", re.IGNORECASE)
    found = {}
    for path in python_files("fp8rl"):
        text, of_a_family = path.read_text(), path.parent in FAMILY_FOLDERS or path.stem == "latent"
        if not of_a_family and (known := {*named.findall(text), *imported_files(text, of_one)}):
            found[str(path.relative_to(ROOT))] = known
    assert found.keys() == KNOW_A_FAMILY.keys(), {file: found[file] for file in found.keys() - KNOW_A_FAMILY.keys()}


def test_inside_studies_the_harness_knows_no_study_and_a_study_no_other() -> None:
    """`names.py` loads one by its name, which is no import in its source."""
    allowed = {"document": {"harness"}, "run": {"harness", "document"}, "harness": set()}
    found = []
    for path in python_files("lab/studies"):
        room = path.relative_to(ROOT / "lab/studies").parts[0].removesuffix(".py")
        may = {f"lab.studies.{other}" for other in allowed.get(room, {"harness"}) | {room}}
        of_studies = lambda module, may=may: module.startswith("lab.studies.") and _top(module, 3) not in may  # noqa: E731
        found += broken([path], of_studies)
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("floor", FLOORS)
def test_imports_inside_rl_never_point_up(floor: str) -> None:
    above = {f"fp8rl.rl.{other}" for other in FLOORS[FLOORS.index(floor) + 1 :]}
    files = [ROOT / f"fp8rl/rl/{floor}.py"] if floor == "loop" else python_files(f"fp8rl/rl/{floor}")
    assert not broken(files, lambda module: _top(module, 3) in above)


def test_every_floor_of_rl_is_under_the_rule() -> None:
    """Nothing else lies at the top of `rl`, and the package itself imports nothing."""
    entries = {path.name.removesuffix(".py") for path in (ROOT / "fp8rl/rl").iterdir() if path.name != "__pycache__"}
    assert entries == {*FLOORS, "__init__"}
    assert imported_modules((ROOT / "fp8rl/rl/__init__.py").read_text()) == []


def test_every_package_is_under_the_rule() -> None:
    """A new top-level package has to be entered in the table above before the suite passes."""
    folders = {path.parent.name for path in ROOT.glob("fp8rl/*/__init__.py")} - {"commands"}
    assert folders | {"fp8rl"} == MAY_IMPORT.keys()


@pytest.mark.slow
def test_no_two_files_import_each_other() -> None:
    """Not even by way of others: where files form a circle, one idea lies in several of them."""
    sorter = TopologicalSorter(imports_between_files())
    sorter.prepare()  # raises CycleError, which names the circle


def test_imported_modules_finds_every_form() -> None:
    source = """import torch, fp8rl.rl.loop as loop
def f():
    from fp8rl.rollout import engine
from fp8rl import models
if TYPE_CHECKING:
    import fp8rl.trainer.actor
importlib.import_module('fp8rl.rl')
from .spec import QuantSpec
text = 'import rl'"""
    found = "torch fp8rl.rl.loop fp8rl.rollout fp8rl.models fp8rl.trainer.actor fp8rl.rl"
    assert [module for _, module in imported_modules(source)] == found.split()


def python_files(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))  # which follows no link
    assert files, f"{package}/ holds no Python file"
    return files


def files_of(package: str) -> list[Path]:
    if package != "fp8rl":
        return python_files(f"fp8rl/{package}")
    return [path for path in python_files("fp8rl") if path.relative_to(ROOT / "fp8rl").parts[0] not in MAY_IMPORT]


def _top(module: str, parts: int) -> str:
    return ".".join(module.split(".")[:parts])


def package_of(module: str) -> str:
    """Return the package, by its name in MAY_IMPORT, or the other module at the top, that a module lies in."""
    top, _, inside = module.partition(".")
    inner = inside.partition(".")[0]
    return inner if top == "fp8rl" and inner in MAY_IMPORT else top


def imported_modules(source: str) -> list[tuple[int, str]]:
    """(line, absolute module name) of every import in the source, inside functions and by literal name too.

    Relative imports are left out: they cannot leave their top-level package.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"fp8rl.{alias.name}" for alias in node.names] if node.module == "fp8rl" else [node.module]
            found += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                found.append((node.lineno, node.args[0].value))
    return sorted(found, key=lambda item: item[0])


def imports_between_files() -> dict[str, set[str]]:
    """Each module of the product and of the lab, and the other modules of both that it imports."""
    modules = {}
    for path in [*python_files("fp8rl"), *python_files("lab")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: imported_files(path.read_text(), modules.keys()) - {name} for name, path in modules.items()}


def imported_files(source: str, modules: Collection[str]) -> set[str]:
    """Those of `modules` that the source imports: `from a import b` is the module a.b where there is one."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & set(modules)) or {node.module}
    return found & set(modules)


def strings(tree: ast.Module) -> list[ast.Constant]:
    """Every string but docstrings."""
    documentation = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node for node in constants if id(node) not in documentation]
