"""What the source may do to a user's disk, and what it may do with what comes from outside."""

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.support.paths import ROOT
from tests.test_architecture import python_files

pytestmark = pytest.mark.slow

REMOVALS = {
    "fp8rl/diagnose/explain/compare.py": {"TemporaryDirectory"},  # operands of one op, in the system's
    "certify/fp8rl_certify/dump/__init__.py": {"TemporaryDirectory"},  # weights of a checkpoint, likewise
    "fp8rl/commands/models.py": {"TemporaryDirectory"},  # an engine's log
    "fp8rl/commands/runs.py": {"rename", "rmdir"},  # what it has just written, into the new folder, and `.new`
    "fp8rl/serving.py": {"TemporaryDirectory"},  # the model as an engine loads it
    "fp8rl/models/checkpoint/writing.py": {"rmtree", "replace"},  # `.OUT.partial`, and files in it
    "fp8rl/numerics/backend/cuda_toolkit.py": {"mkdtemp", "rename", "rmtree"},  # a view of links, a free name
    "fp8rl/numerics/core/files.py": {"rmtree", "unlink", "replace"},  # `.NAME.partial`, `.NAME.retired`, the file
    "fp8rl/rl/guard/capsule.py": {"rmtree"},  # `capsules/step_N`
    "fp8rl/rl/record/run_dir.py": {"rename", "unlink", "rmtree"},  # to NAME.replaced-TIME; a lock; repeated steps
    "fp8rl/rl/run/checkpoints.py": {"replace", "rmtree"},  # `.step_N.pending`, to a name that was free; `step_N`
    "fp8rl/rl/run/cluster/cluster.py": {"TemporaryDirectory"},  # Ray's token
    "fp8rl/rl/run/cluster/nodes.py": {"unlink"},  # `.seen-RANDOM`
    "fp8rl/rl/run/run.py": {"TemporaryDirectory", "rmtree"},  # a pair of engines; `served`
    "fp8rl/rollout/engine/server/scratch.py": set("mkdtemp rename unlink rmtree".split()),  # our scratch, and shared
    # memory of its note
    "lab/studies/model_scale.py": {"rmtree"},  # a model that it has made
    "lab/studies/run.py": {"TemporaryDirectory"},
    "fp8rl/training.py": {"NamedTemporaryFile"},  # a spec for the process that trains
    "fp8rl/trainer/checkpoint/files.py": {"rmtree"},  # `.step_N.partial`
}
"""Each file that removes or renames, with the calls, and what they may touch."""
_REMOVING = {
    *"rmtree unlink remove removedirs rmdir rename renames replace move".split(),
    *"TemporaryDirectory NamedTemporaryFile mkdtemp".split(),
}
_OF_TEXTS = {"replace", "remove", "move"}
"""Also names of what does no such thing, to a text, a list or a dataclass."""


def test_every_removal_and_renaming_is_in_the_table() -> None:
    assert found_by(removal) == REMOVALS


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("fp8rl", "certify", "lab/studies"):
        for path in python_files(folder):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def found_by(named: Callable[[ast.AST], str | None]) -> dict[str, set[str]]:
    """What `named` calls nodes of the sources, by their file."""
    found: dict[str, set[str]] = {}
    for path, tree in sources():
        if names := {*map(named, ast.walk(tree))} - {None}:
            found[path] = names
    return found


def removal(node: ast.AST) -> str | None:
    """The name of a function that removes or renames files, where this is one: called, or handed on as a callback."""
    match node:
        case ast.ImportFrom(module="os" | "shutil", names=names):
            return next((alias.name for alias in names if alias.name in _REMOVING), None)
        case ast.Name(id=name) if name not in _OF_TEXTS:
            return name if name in _REMOVING else None
        case ast.Call(func=ast.Attribute(value=owner, attr="replace"), args=[_], keywords=[]):
            # Of a path: that of a text takes two, that of a dataclass keywords.
            return None if isinstance(owner, ast.Name) and owner.id == "dataclasses" else "replace"
        case ast.Attribute(value=ast.Name(id="os" | "shutil"), attr=name) if name in _REMOVING:
            return name
        case ast.Attribute(attr=name) if name in _REMOVING - _OF_TEXTS:
            return name
    return None


CODE = {
    "certify/fp8rl_certify/dump/reference.py": {"from_pretrained"},  # of a config and tensors that were read already
    "fp8rl/__init__.py": {"import_module"},  # names of its table
    "fp8rl/models/plain_yaml.py": {"load"},  # by the safe loader
    "fp8rl/models/cards.py": {"load"},  # YAML of a data set's card, by the safe loader
    "fp8rl/models/architecture.py": {"import_module"},  # files in fp8rl/models/architectures
    "fp8rl/numerics/probe.py": {"import_module"},  # files in fp8rl/numerics/ops
    "fp8rl/numerics/kernels/kernels.py": {"import_module"},  # files in fp8rl/numerics/kernels
    "fp8rl/trainer/modules/native/__init__.py": {"import_module"},  # files in fp8rl/trainer/modules/native
    "fp8rl/rl/algorithms/__init__.py": {"import_module"},  # files in fp8rl/rl/algorithms
    "fp8rl/rl/record/trackers/__init__.py": {"import_module"},  # names of its table
    "fp8rl/numerics/core/files.py": {"exec_module"},  # files of Python that a spec names
    "fp8rl/rollout/tasks/named_functions.py": {"import_module"},  # functions that a spec names, to train or to judge
    "lab/studies/harness/study.py": {"import_module"},  # names of studies
    "lab/studies/harness/engine_hook/sitecustomize.py": {"exec_module"},  # our own module
    "lab/studies/harness/live.py": {"from_pretrained"},  # the demo's tokenizer
    "fp8rl/trainer/actor.py": {"loads"},  # what another rank has written, by Ray
    "fp8rl/trainer/checkpoint/pickles.py": {"Unpickler"},  # which knows a few classes
    "fp8rl/trainer/megatron/patches.py": {"import_module"},  # our own modules
}
"""Each file that could make code of data, by calls that could; what they are given."""
_MAKES_CODE = set("eval exec __import__ import_module exec_module run_path run_module".split())
_PICKLES = set("pickle dill joblib marshal shelve cloudpickle".split())
_WRITES = {"dump", "dumps", "UnpicklingError", "register_pickle_by_value"}


def test_nothing_makes_code_or_objects_of_what_comes_from_outside() -> None:
    assert found_by(code) == CODE


def code(node: ast.AST) -> str | None:
    """What could run code that it is given, or make objects of any class, where this is such a name or call."""
    match node:
        case ast.ImportFrom(module=module, names=names):
            return module if module in _PICKLES and {alias.name for alias in names} - _WRITES else None
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in _PICKLES:
            return None if name in _WRITES else name
        case ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "load_all" | "unsafe_load" | "full_load"):
            return node.attr
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="builtins"), attr=name)):
            return name if name in _MAKES_CODE else None
        case ast.Call(func=ast.Attribute(value=owner, attr=name), keywords=keywords):
            given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in keywords}
            match getattr(owner, "id", ""), name:
                case "torch", "load":
                    return None if given.get("weights_only") is True else name
                case "np" | "numpy", "load":
                    return None if given.get("allow_pickle") is False else name
                case _, "from_pretrained":
                    return None if given.get("trust_remote_code") is False else name
            return name if name in _MAKES_CODE - {"eval"} else None  # of a module of torch, eval() is a mode
    return None


PRINTS = {
    "certify/fp8rl_certify/cli.py": "JSON", "fp8rl/cli.py": "the version", "fp8rl/commands/__init__.py": "JSON",
    "fp8rl/commands/diagnosis.py": "JSON", "fp8rl/commands/models.py": "JSON",
    "fp8rl/numerics/core/errors.py": "what was made printable", "fp8rl/rollout/tasks/rewards/workers.py": "JSON",
    "lab/studies/harness/kept_runs.py": "lines of ours", "lab/studies/prototypes/gated_delta.py": "numbers",
}  # fmt: skip
"""Each file that prints by itself, and what. All other lines go through `numerics.core.errors` or `PlainConsole`."""


def test_texts_reach_a_terminal_by_one_way() -> None:
    printing, consoles = set(), set()
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = ast.unparse(node.func)
                if name in ("print", "typer.echo", "click.echo", "sys.stdout.write", "sys.stderr.write"):
                    printing.add(path)
                elif name in ("Console", "rich.print", "Text.from_markup", "Text.from_ansi"):
                    consoles.add(path)
    assert printing == PRINTS.keys() and not consoles
