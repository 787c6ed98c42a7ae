"""Docstrings say first what a thing is, in plain word order."""

import ast
import re
from pathlib import Path

from tests.support.paths import ROOT

PACKAGES = "numerics models rollout trainer weight_sync rl diagnose studies fp8rl bench".split()
INVERTED = re.compile(r"(Of|By|In|As|From|For|On|With|To|At)\b")


def test_no_docstring_opens_with_a_preposition() -> None:
    """`Of the run's file` makes a reader wait for what it is; `the upload of the run's file` does not."""
    found = [
        f"{path.relative_to(ROOT)}:{line} {text.splitlines()[0]}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in docstrings(path)
        if INVERTED.match(text)
    ]
    assert not found


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Docstrings of the file, its classes, functions, constants and fields, each with its line."""
    return [
        (statement.lineno, statement.value.value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]
