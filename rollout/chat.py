"""Renders conversations as tokens, by the tokenizer's chat template. Nothing else in the product applies a template.

A row of tokens only grows: what was sampled is never tokenized again. So a message after the model's turn is rendered
as the text that the template writes between that turn's content and the model's next turn, and tokenized by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2

from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.reading import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""One turn of a chat: `role`, `content`, and whatever else the chat template reads."""

TODAY = date(2025, 1, 1)
"""The date of templates that write today's. A prompt is a function of the data, not of the day of the run."""
MOST_CHARACTERS = 8 << 20
"""Characters of a rendered text: no model reads more, and the tokenizer would take minutes."""
SAID = "\ue000said\ue001"
"""Stands for a turn's content, of private characters that no message has."""
_THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


class RewritingTemplateError(UserError):
    """A chat template that changes what stands before a message, so that no tokens continue a conversation."""


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: Mapping[str, Any], *, answer: bool
) -> str:
    """Return the text that the template writes for messages.

    options: further arguments of the template, `tools` among them. answer: up to where the model's turn begins.

    Raises jinja2.TemplateError, TypeError, ValueError: the template cannot write them.
    """
    text: str = tokenizer.apply_chat_template(
        [_readable(message) for message in messages],
        tokenize=False,
        add_generation_prompt=answer,
        **template_arguments(options),
    )
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a text of {len(text)} characters, more than {MOST_CHARACTERS}")
    return text


def template_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a template besides messages: these, and a fixed date."""
    return {"strftime_now": TODAY.strftime, **options}


def read_arguments(found: Any) -> Any:
    """Parse the arguments of a call into an object, as templates read its parts.

    Missing arguments, however they are written, are an empty object. A text that is no JSON stays one.
    """
    if isinstance(found, str):
        try:
            found = parse_json(found) if found.strip() else None
        except ValueError:
            return found
    return {} if found is None or found == "" else found


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: Mapping[str, Any] | None = None
) -> list[int]:
    """Tokenize a conversation up to where the model's turn begins; see `render`."""
    return _tokens(tokenizer, render(tokenizer, messages, options or {}, answer=True))


def opening_ids(
    tokenizer: PreTrainedTokenizerBase,
    opened: Sequence[int],
    history: Sequence[Message],
    messages: Sequence[Message],
    options: Mapping[str, Any],
) -> list[int]:
    """Tokenize a prompt with further messages at its end, before the model has said anything.

    opened: tokens of `history`, up to where the model's turn began.

    Raises RewritingTemplateError: the template changes what stands before the messages.
    """
    begun = render(tokenizer, history, options, answer=False)
    turn = render(tokenizer, history, options, answer=True).removeprefix(begun)
    whole = render(tokenizer, [*history, *messages], options, answer=True)
    begin = _tokens(tokenizer, turn)
    if not whole.startswith(begun) or list(opened[len(opened) - len(begin) :]) != begin:
        raise _rewritten(messages)
    return [*opened[: len(opened) - len(begin)], *_tokens(tokenizer, whole.removeprefix(begun))]


def continuation_ids(
    tokenizer: PreTrainedTokenizerBase,
    history: Sequence[Message],
    turn: Sequence[int],
    messages: Sequence[Message],
    options: Mapping[str, Any],
    calls: Sequence[Mapping[str, Any]] = (),
    truncated: bool = False,
) -> list[int]:
    """Tokenize what follows the model's turn: its end, unless the turn has it, messages, and the next turn's opening.

    history: messages before the turn. turn: its tokens. calls: of tools, in it; a template may read their names and
    ids. truncated: its length has ended it, so that none of its tokens ends it. options: see `render`.

    Raises:
        RewritingTemplateError: the template changes what stands before the messages, so that no tokens continue it.
        jinja2.TemplateError, TypeError, ValueError: it cannot write them.
    """
    following = _tokens(tokenizer, _following(tokenizer, history, messages, options, calls))
    return following[0 if truncated else _shared(turn, following) :]


def answer_ids(
    tokenizer: PreTrainedTokenizerBase, history: Sequence[Message], answer: str, options: Mapping[str, Any]
) -> list[int]:
    """Tokenize an answer as the template writes it after its prompt, up to the token that ends the turn.

    A template may leave the thoughts of an answer out that it has begun in the prompt: then the answer goes on there.
    """
    opened = render(tokenizer, history, options, answer=True)
    whole = render(tokenizer, [*history, {"role": "assistant", "content": answer}], options, answer=False)
    marked = render(tokenizer, [*history, {"role": "assistant", "content": SAID}], options, answer=False)
    turn = opened.removeprefix(render(tokenizer, history, options, answer=False))
    written = whole.removeprefix(opened) if whole.startswith(opened) else answer.removeprefix(_begun(turn, answer))
    text = written.removesuffix(marked.partition(SAID)[2])
    return [*_tokens(tokenizer, text), end_ids(tokenizer)[0]]


def _begun(turn: str, answer: str) -> str:
    """Return the beginning of an answer, such as <think>, with which the turn's opening ends; empty: there is none."""
    longest = next((n for n in range(min(len(turn), len(answer)), 0, -1) if turn.endswith(answer[:n])), 0)
    return answer[:longest] if answer[:longest].strip() else ""


def end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens at which the model's turn ends, the usual one first.

    Those are the template's own, where it is a token of its own: the end of turn or, in templates without one, the
    token of the role that speaks next; and the tokenizer's `eos_token`.
    """
    found = []
    for role in ("user", "tool"):
        try:
            text = _following(tokenizer, [{"role": "user", "content": "?"}], [{"role": role, "content": "?"}], {})
        except (jinja2.TemplateError, TypeError, ValueError):
            continue  # a role that it does not know; what else is wrong is said where a conversation needs it
        if (ids := _tokens(tokenizer, text)) and ids[0] in tokenizer.added_tokens_decoder:
            found.append(ids[0])
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(found))


def _following(
    tokenizer: PreTrainedTokenizerBase,
    history: Sequence[Message],
    messages: Sequence[Message],
    options: Mapping[str, Any],
    calls: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the text after the content and the calls of a turn, up to where the model's next turn begins."""
    # An earlier turn of the model without its words, of which a template may show less later.
    before = [{**message, "content": "said"} if message["role"] == "assistant" else message for message in history]
    said: dict[str, Any] = {"role": "assistant", "content": SAID}
    begun = render(tokenizer, before, options, answer=False)
    content = SAID
    if calls:
        plain = render(tokenizer, [*before, said], options, answer=False)
        said["tool_calls"] = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
        called = render(tokenizer, [*before, said], options, answer=False)
        start, _, end = plain.rpartition(SAID)
        while not called.endswith(end):  # what ends a turn with calls and one without
            end = end[1:]
        content = called.removeprefix(start).removesuffix(end)
    whole = render(tokenizer, [*before, said, *messages], options, answer=True)
    start, found, following = whole.rpartition(content)
    if not found or not _THOUGHTS.sub("", start).startswith(_THOUGHTS.sub("", begun)):
        raise _rewritten(messages)
    return following


def _readable(message: Message) -> dict[str, Any]:
    """Copy a message, with the arguments of its calls as objects."""
    copied = dict(message)
    if isinstance(calls := copied.get("tool_calls"), list | tuple):
        copied["tool_calls"] = []
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping):
                call = {**call, "function": {**function, "arguments": read_arguments(function.get("arguments"))}}
            copied["tool_calls"].append(call)
    return copied


def _shared(turn: Sequence[int], following: Sequence[int]) -> int:
    """Count the tokens of `following` that the turn ends with, before at most one end that the template does not
    know."""
    for written in (list(turn), list(turn[:-1])):
        for count in range(min(len(written), len(following)), 0, -1):
            if written[-count:] == list(following[:count]):
                return count
    return 0


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _rewritten(messages: Sequence[Message]) -> RewritingTemplateError:
    role = messages[0]["role"] if messages else "further"
    return RewritingTemplateError(
        f"environment: found a chat template that changes earlier text when a {role} message follows, "
        "expected one that only adds to the model's turn. Have the environment use tell() with the text itself."
    )


# Bounds on the number of tokens of a text, for texts that would take minutes to tokenize.

TOKENS_PER_BYTE = 4
"""No tokenizer in use yields more tokens for a byte of text."""


def fewest_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> int:
    """Return the fewest tokens that a text of `size` bytes has."""
    return -(-size // widest_token(tokenizer))


@lru_cache(maxsize=8)
def widest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the bytes of the longest token."""
    return max(len(token.encode()) for token in tokenizer.get_vocab())


def text_size(value: Any) -> int:
    """Return the bytes of all texts in a value of JSON; names of keys are not counted."""
    if isinstance(value, str):
        return len(value.encode())
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(text_size, parts))
