"""Reads the problems of a data set from the columns that the spec names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.rollout.tasks.chat import content_text
from fp8rl.rollout.tasks.data.rows import Row, Rows, open_rows
from fp8rl.rollout.types import Message, Problem

_ABSENT = object()


@dataclass(frozen=True)
class Source:
    """A data set: its path and its columns."""

    path: str | Path
    key: str = "data"
    """The key of the spec for error messages."""
    split: str | None = None
    """The split to read, if the data set has several."""
    question: str = "question"
    """The name of the column with the question. `a.b` is the value `b` nested in the column `a`."""
    answer: str = "answer"
    """The name of the column with the reference answer, in the same form."""
    system_prompt: str = ""
    """The system prompt of conversations that have none of their own. Empty: no system prompt."""
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    """As in `Problem`."""
    name: str | None = None
    """The configuration to read, if the data set has several."""


def load_problems(source: Source) -> Problems:
    """Return the problems of a source in its order. Each is read only when it is used. Raises UserError, which names
    the source's key: the path does not exist, or has no rows, or lacks a column. A row that is no problem raises
    UserError when it is read."""
    rows = open_rows(Path(source.path), source.split, source.key, source.name, (source.question, source.answer))
    if not rows:
        remedy = 'Add lines such as {"question": "2+3=?", "answer": "#### 5"}.'
        raise user_error(source.key, f"{source.path} without a {rows.unit}", "at least one problem", remedy)
    for what in ("question", "answer"):
        column = getattr(source, what)
        if rows.columns is not None and column not in rows.columns and column.partition(".")[0] not in rows.columns:
            expected = f"a column of {source.path}, which has {', '.join(rows.columns)}"
            remedy = f"Set data.keys.{what}, or keys.{what} of the source, to the column with the {what}."
            raise user_error(f"{source.key}: keys.{what}", column, expected, remedy)
    return Problems(rows, source)


class Problems(Sequence[Problem]):
    """The problems of one source."""

    def __init__(self, rows: Rows, source: Source) -> None:
        self._rows, self.source = rows, source

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._problem(self._rows[index], index)

    def __iter__(self) -> Iterator[Problem]:
        for index, row in enumerate(self._rows):
            yield self._problem(row, index)

    def name(self, index: int) -> str:
        """Return the name of a problem for messages, such as `line 3`."""
        return f"{self._rows.unit} {index + 1}"

    def _problem(self, row: Row, index: int) -> Problem:
        source, name = self.source, self.name(index)
        where, remedy = f"{source.key}: {name} of {source.path}", f"Correct or remove {name}."
        values = {}
        for what in ("question", "answer"):
            values[what] = _value(row, getattr(source, what))
            if values[what] is _ABSENT:
                expected = f"a column {getattr(source, what)!r} for the {what}"
                remedy = f"Correct {name}, or set data.keys.{what} (keys.{what} of the source) to the right column."
                raise user_error(where, _names(row), expected, remedy)
        question, answer = values["question"], values["answer"]
        if isinstance(answer, int) and not isinstance(answer, bool):
            answer = str(answer)
        if not _is_text(answer):
            raise user_error(f"{where}: {source.answer}", answer, "non-empty text, or a whole number", remedy)
        system = [{"role": "system", "content": source.system_prompt}] if source.system_prompt else []
        messages: list[Message] = []
        if isinstance(question, list):
            messages = _messages(question, f"{where}: {source.question}", remedy)
            messages = messages if messages[0]["role"] in ("system", "developer") else [*system, *messages]
            question = next((m["content"] for m in reversed(messages) if m["role"] == "user"), messages[-1]["content"])
        elif not _is_text(question):
            expected = "non-empty text, or a list of chat messages"
            raise user_error(f"{where}: {source.question}", found=question, expected=expected, remedy=remedy)
        elif system:
            messages = [*system, {"role": "user", "content": question}]
        further = {name: value for name, value in row.items() if name not in (source.question, source.answer)}
        return Problem(question, answer, tuple(messages), further, source.chat_template)


def _value(row: Row, column: str) -> Any:
    """Look up a column in a row, by its whole name or as a nested value. Return `_ABSENT` if there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            return _ABSENT
        value = value[name]
    return value


def _messages(turns: list[Any], where: str, remedy: str) -> list[Message]:
    """Return the turns of a conversation that the model is to answer, without keys that are null.

    As in OpenAI's API, content may come in parts, and that of a turn that calls tools may be null or missing.
    """
    messages: list[Message] = []
    for turn in turns:
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if isinstance(content, list) or (content is None and isinstance(turn, dict) and turn.get("tool_calls")):
            with suppress(UserError):  # it is told below, with its place
                content = content_text(content)
        if not _is_text(role) or not isinstance(content, str) or not _encodes(content):
            expected = "chat messages with role and content, which are text (no pictures)"
            raise user_error(where, found=turn, expected=expected, remedy=remedy)
        messages.append({name: value for name, value in {**turn, "content": content}.items() if value is not None})
    if not messages or messages[-1]["role"] == "assistant" or not messages[-1]["content"].strip():
        expected = "chat messages that end in a text to answer, which is not the assistant's"
        raise user_error(where, turns, expected, remedy)
    return messages


def _names(row: Row) -> list[str]:
    """Return the names of a row's values. The name of a nested value is `a.b`."""
    inner = {name: _names(value) if isinstance(value, dict) else [] for name, value in row.items()}
    return [path for name, parts in inner.items() for path in ([f"{name}.{part}" for part in parts] or [name])]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and _encodes(value)


def _encodes(text: str) -> bool:
    """Return True if UTF-8 can encode a text. It cannot encode half of a surrogate pair, which JSON may spell."""
    return text.encode("utf-8", "replace").decode() == text
