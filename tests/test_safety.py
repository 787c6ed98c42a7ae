"""What the source may do to a user's disk, and what it may do with what comes from outside."""

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT
from tests.test_architecture import MAY_IMPORT, python_files

REMOVALS = {
    "diagnose/attribution/probe.py": {"TemporaryDirectory"},  # operands of one op, in the system's temporary directory
    "diagnose/certify/dump/ours.py": {"TemporaryDirectory"},  # weights of a checkpoint, likewise
    "fp8rl/commands/models.py": {"TemporaryDirectory"},  # an engine's log
    "fp8rl/serving.py": {"TemporaryDirectory"},  # the model as an engine loads it
    "models/storing.py": {"rmtree", "replace"},  # `.OUT.partial`, and files in it
    "models/tiny.py": {"mkdtemp", "rename", "rmtree"},  # `.OUT.random`, and a name that was free
    "numerics/io/files.py": {"rmtree", "unlink", "replace"},  # `.NAME.partial`, `.NAME.retired`, and the file itself
    "rl/record/run_lock.py": {"unlink"},  # `.NAME.lock`, once its content was found to be a lock's
    "rl/record/written.py": {"unlink", "rmdir"},  # names that a run writes
    "rl/run/checkpoints.py": {"replace"},  # `.step_N.pending`, to a name that was free
    "rl/run/cluster/cluster.py": {"TemporaryDirectory"},  # Ray's token
    "rl/run/cluster/nodes.py": {"unlink"},  # `.seen-RANDOM`
    "rl/run/stack.py": {"TemporaryDirectory"},  # a pair of engines
    "rollout/environments/sandbox.py": {"TemporaryDirectory"},  # where a program runs
    "rollout/server/scratch.py": {
        "mkdtemp",
        "rename",
        "unlink",
        "rmtree",
    },  # our scratch, and shared memory of its note
    "studies/model_scale/two_sides.py": {"rmtree"},  # a model that it has made
    "studies/prototypes/gated_delta_engine.py": {"TemporaryDirectory"},
    "studies/run.py": {"TemporaryDirectory"},
    "trainer/checkpoint/files.py": {"rmtree"},  # `.step_N.partial`
}
"""Each file that removes or renames, with the calls, and what they may touch."""
_REMOVING = {
    *"rmtree unlink remove removedirs rmdir rename renames replace move".split(),
    *"TemporaryDirectory NamedTemporaryFile mkdtemp".split(),
}
_OF_TEXTS = {"replace", "remove", "move"}
"""Also names of what does no such thing, to a text, a list or a dataclass."""


def test_every_removal_and_renaming_is_in_the_table() -> None:
    found: dict[str, set[str]] = {}
    for path, tree in sources():
        for node in ast.walk(tree):
            if (name := removal(node)) is not None:
                found.setdefault(path, set()).add(name)
    assert found == REMOVALS


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in MAY_IMPORT:
        for path in python_files(package):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def removal(node: ast.AST) -> str | None:
    """The name of a function that removes or renames files, where this is one: called, or handed on as a callback."""
    match node:
        case ast.ImportFrom(module="os" | "shutil", names=names):
            return next((alias.name for alias in names if alias.name in _REMOVING), None)
        case ast.Name(id=name) if name not in _OF_TEXTS:
            return name if name in _REMOVING else None
        case ast.Call(func=ast.Attribute(value=owner, attr="replace"), args=[_], keywords=[]):
            return None if isinstance(owner, ast.Name) and owner.id == "dataclasses" else "replace"  # of a path: that of a text takes two, that of a dataclass keywords
        case ast.Attribute(value=ast.Name(id="os" | "shutil"), attr=name) if name in _REMOVING:
            return name
        case ast.Attribute(attr=name) if name in _REMOVING - _OF_TEXTS:
            return name
    return None
