"""Prints docs/api.md, from the code of what users import.

Signatures, fields and texts are those of the source, so that the page cannot differ from it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import fp8rl

GROUPS = {
    "Runs": ("train", "Run", "RolloutRecord", "RunFailedError", "load_experiment", "Experiment"),
    "Environments and data": ("Conversation", "Turn", "Problem"),
    "Algorithms": (
        *("PolicyGradient", "AlgorithmConfig", "Needs", "Outcomes", "TokenBatch", "Surrogate"),
        *("Objective", "ObjectiveOutput", "used_tokens"),
    ),
    "Errors": ("UserError",),
}
ONLY = {"Conversation": ("begin", "sample", "tell", "message", "room", "turns")}
"""The members for users of a class that has others for the run itself."""
_HEAD = """\
# Python interface

This page has the names that `from fp8rl import ...` gives. `make pages` writes it from the source. Only these names are
kept from version to version. [extending.md](extending.md) shows them at work. Each member has its signature and the
first sentence of its docstring; `help(NAME)` prints the rest. The sections of `Experiment`, and the settings of
`PolicyGradient`, are keys of a spec: [reference.md](reference.md).

B is the number of rows of a batch, S is their length in tokens, and N is the number of trajectories. A log-probability
or a mask at index t belongs to the token at t.
"""


def page() -> str:
    """Return the page, in Markdown."""
    parts = [_HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += [f"### {name}\n", *_described(name)]
    return "\n".join(parts)


def _described(name: str) -> Iterator[str]:
    thing = getattr(fp8rl, name)
    source = textwrap.dedent(inspect.getsource(thing))
    (node,) = ast.parse(source).body
    if isinstance(node, ast.FunctionDef):
        yield _code([f"{name}{_signature(node)}"])
        yield _paragraphs(node)
        return
    assert isinstance(node, ast.ClassDef)
    yield _paragraphs(node)
    fields = {_written(source, field): _text_below(node, field) for field in _fields(node, name)}
    if bare := [field for field, text in fields.items() if not text]:
        yield _code(bare)
    items = [f"- `{field}`: {text}" for field, text in fields.items() if text]
    items += [_member(thing, member) for member in _members(node, name)]
    if items:
        yield "Members:\n"
        yield "\n".join(items) + "\n"


def _fields(node: ast.ClassDef, name: str) -> Iterator[ast.AnnAssign]:
    """Yield the public fields of a class; of PolicyGradient, whose settings are keys of a spec, the others alone."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_key = name == "PolicyGradient" and "ClassVar" not in ast.unparse(statement.annotation)
            if not statement.target.id.startswith("_") and not is_key:
                yield statement


def _members(node: ast.ClassDef, name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    only = ONLY.get(name)
    for member in node.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            shown = member.name == "__call__" or not member.name.startswith("_")
            if shown and (not only or member.name in only):
                yield member


def _member(owner: type, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    waits = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    is_property = any(ast.unparse(each) == "property" for each in node.decorator_list)
    shown = f"{node.name} -> {_returned(node)}" if is_property else f"{waits}{node.name}{_signature(node)}"
    text = _first_sentence(inspect.getdoc(getattr(owner, node.name)) or "")  # a base's docstring, if it has none
    return f"- `{shown}`" + (f": {text}" if text else "")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.unparse(node.args)
    return f"({re.sub(r'^(self|cls)(, )?(/, )?', '', arguments)}) -> {_returned(node)}"


def _returned(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return "None" if node.returns is None else ast.unparse(node.returns)


def _written(source: str, field: ast.AnnAssign) -> str:
    """Return a field as it is written, in one line; `ast.unparse` would choose other quotes."""
    text = " ".join((ast.get_source_segment(source, field) or "").split())
    return re.sub(r"\bLogProb\b", "float", text)  # which it is: a file has null where it is not finite


def _text_below(node: ast.ClassDef, field: ast.AnnAssign) -> str:
    """Return the text below a field, which says what it is."""
    following = node.body[node.body.index(field) + 1 :][:1]
    value: Any = following[0].value if following and isinstance(following[0], ast.Expr) else None
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return _first_sentence(value.value)
    return ""


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s(?=[A-Z])", _plain(" ".join(text.split())), maxsplit=1)[0]


def _paragraphs(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return a docstring as Markdown: `Args:` and the like become lists."""
    found = []
    for block in (ast.get_docstring(node) or "").split("\n\n"):
        first, *rest = block.split("\n")
        if not re.fullmatch(r"(Args|Attributes|Raises|Returns):", first):
            found.append(_plain(" ".join(block.split())) + "\n")
            continue
        entries = textwrap.dedent("\n".join(rest))
        items = [" ".join(item.split()) for item in re.split(r"\n(?=\S)", entries)]
        found.append(f"{first}\n\n" + "".join(f"- {_plain(item)}\n" for item in items))
    return "\n".join(found)


def _plain(text: str) -> str:
    return re.sub(r":\w+:`", "`", text)


def _code(lines: list[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```\n"


if __name__ == "__main__":
    print(page(), end="")
