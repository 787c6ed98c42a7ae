"""What `from fp8rl import ...` gives."""

import ast
import importlib
import subprocess
import sys

import pytest

import fp8rl
from docs.hooks import api
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", fp8rl.__all__)
def test_every_public_name_is_what_lies_at_its_home(name: str) -> None:
    assert getattr(fp8rl, name) is getattr(importlib.import_module(fp8rl._HOME[name]), name)


def test_what_a_type_checker_sees_is_what_is_imported() -> None:
    tree = ast.parse((ROOT / "fp8rl/__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == fp8rl._HOME and sorted(seen) == sorted(fp8rl.__all__)


def test_the_package_itself_imports_nothing() -> None:
    code = "import fp8rl, sys; print([name for name in sys.modules if name.startswith(('fp8rl.', 'torch', 'ray'))])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_an_unknown_name_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Convresation'; it has .*Conversation"):
        _ = fp8rl.Convresation  # type: ignore[attr-defined]


def test_examples_import_the_public_interface_alone() -> None:
    """A user's file needs no more than `fp8rl`, but for an architecture and for the end of a program's process."""
    parts: dict[str, tuple[str, ...]] = {
        "own_llama.py": ("fp8rl.models",),
        "own_kimi_linear.py": ("fp8rl.models", "fp8rl.numerics"),
        "python_tool.py": ("fp8rl.rollout",),
    }
    for path in sorted((ROOT / "examples").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                module = str(node.module)
                inner = module.startswith("fp8rl.") and not module.startswith(parts.get(path.name, ("none",)))
                assert not inner, f"{path.name}:{node.lineno} imports {module}"


def test_the_page_of_the_interface_is_up_to_date_and_has_every_name() -> None:
    """`make pages` writes it."""
    shown = [name for names in api.GROUPS.values() for name in names]
    assert sorted(shown) == sorted(fp8rl.__all__)
    page = api.page()
    assert (ROOT / "docs/api.md").read_text() == page and "_main" not in page and "_files" not in page
