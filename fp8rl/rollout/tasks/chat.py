"""Renders conversations as tokens, by the tokenizer's chat template. Only this file applies a template.

A row of tokens only grows, and sampled tokens are never tokenized again. So for a message after the model's turn, the
template writes the whole conversation, but only the text from this turn to the model's next turn is tokenized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

import jinja2

from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.reading import parse_json
from fp8rl.rollout.tasks.tokens import behind_ids, text_of, written_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""One turn of a chat: `role`, `content`, and other keys that the chat template reads."""

TODAY = date(2025, 1, 1)
"""The date that templates get in place of today's, so that a prompt does not depend on the day of the run."""
MOST_CHARACTERS = 8 << 20
"""Largest number of characters of a rendered text. No model reads more, and the tokenizer would take minutes."""
ASKED = {"role": "user", "content": "?"}
"""A question, to try a template with."""
SAID = "\ue000said\ue001"
"""A placeholder for the content of a turn. It has private characters, which no message has."""
THOUGHT = "\ue000thought\ue001"
"""A placeholder for the thoughts of a turn, like `SAID`."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of OpenAI's API. `developer` is its newer name for `system`. Few templates know the newer name."""
KEYS_OF_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
"""The keys under which clients send a turn's thoughts. Templates that write thoughts read one of the first three."""
_THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


class RewritingTemplateError(UserError):
    """A chat template changes the text before a new message, so the conversation's tokens cannot be continued."""


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: Mapping[str, Any], *, answer: bool
) -> str:
    """Return the text that the template writes for messages.

    options: more arguments of the template, such as `tools`. answer: end with the opening of the model's turn.

    Raises:
        UserError: the template leaves out a message or its thoughts.
        jinja2.TemplateError, TypeError, ValueError: the template cannot write the messages.
    """

    def write(found: Sequence[Message], answer: bool = False) -> str:
        text: str = tokenizer.apply_chat_template(
            list(found), tokenize=False, add_generation_prompt=answer, **{"strftime_now": TODAY.strftime, **options}
        )
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"a text of {len(text)} characters, more than {MOST_CHARACTERS}")
        return text

    def attempt(found: Sequence[Message]) -> str | None:
        try:
            return write(found)
        except (jinja2.TemplateError, TypeError, ValueError):
            return None

    return write(_in_known_roles(attempt, [_readable(attempt, message) for message in messages]), answer)


def read_arguments(found: Any) -> Any:
    """Parse the arguments of a tool call into an object, because templates read its parts.

    Missing arguments, in any form, give an empty object. A text that is no JSON stays a text.
    """
    if isinstance(found, str):
        try:
            found = parse_json(found) if found.strip() else None
        except ValueError:
            return found
    return {} if found is None or found == "" else found


def with_arguments(call: Any, form: Callable[[Any], Any] = read_arguments) -> Any:
    """Copy a tool call with the arguments in another form. What is no call of a function stays as it is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": form(function.get("arguments"))}}


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: Mapping[str, Any] | None = None
) -> list[int]:
    """Tokenize a conversation up to the beginning of the model's turn. See `render`."""
    return written_ids(tokenizer, render(tokenizer, messages, options or {}, answer=True))


def continuation_ids(
    tokenizer: PreTrainedTokenizerBase,
    history: Sequence[Message],
    turn: Sequence[int],
    messages: Sequence[Message],
    options: Mapping[str, Any],
    calls: Sequence[Mapping[str, Any]] = (),
    truncated: bool = False,
) -> list[int]:
    """Tokenize what follows the model's turn: the end of turn unless it is there, `messages`, and the next opening.

    history: messages before the turn. turn: the turn's tokens. calls: the turn's tool calls, because a template may
    read their names and ids. truncated: the length ended the turn, not its last token. options: see `render`.

    Raises:
        RewritingTemplateError: the template changes the text before `messages`.
        jinja2.TemplateError, TypeError, ValueError: the template cannot write the messages.
    """
    following = behind_ids(tokenizer, _following(tokenizer, history, messages, options, calls))
    return following[0 if truncated else _shared(tokenizer, turn, following) :]


def answer_ids(
    tokenizer: PreTrainedTokenizerBase, history: Sequence[Message], answer: str, options: Mapping[str, Any]
) -> list[int]:
    """Tokenize an answer in the form that the template gives it after its prompt, up to the token that ends the turn.

    If a template opens thoughts in the prompt, but drops an answer's thoughts, the answer's text continues the prompt.
    Raises UserError: such an answer has no thoughts.
    """
    opened = render(tokenizer, history, options, answer=True)
    whole = render(tokenizer, [*history, {"role": "assistant", "content": answer}], options, answer=False)
    marked = render(tokenizer, [*history, {"role": "assistant", "content": SAID}], options, answer=False)
    turn = opened.removeprefix(render(tokenizer, history, options, answer=False))
    written = whole.removeprefix(opened) if whole.startswith(opened) else answer.removeprefix(_begun(turn, answer))
    if opened.rstrip().endswith("<think>") and "</think>" not in written:
        raise UserError(
            "answer: found no thoughts, expected some up to </think>, because the chat template opens them in prompts. "
            "Write them, or turn them off in data.chat_template if the template has an argument for this."
        )
    end, after = end_ids(tokenizer)[0], marked.partition(SAID)[2]
    before_end, ends, _ = after.partition(text_of(tokenizer, [end]))  # a template may put a blank there
    text = written.removesuffix(after) + before_end * bool(ends)
    return [*behind_ids(tokenizer, text, written_ids(tokenizer, opened)), end]


def _begun(turn: str, answer: str) -> str:
    """Return the beginning of an answer that the turn's opening already has, such as <think>, else an empty text."""
    longest = next((n for n in range(min(len(turn), len(answer)), 0, -1) if turn.endswith(answer[:n])), 0)
    return answer[:longest] if answer[:longest].strip() else ""


def end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end the model's turn, the usual one first.

    First come special tokens that the template writes after a turn: the end of turn or, in templates without one, the
    role of the next turn. The last is the tokenizer's `eos_token`.
    """
    found = []
    for role in ("user", "tool"):
        try:
            text = _following(tokenizer, [ASKED], [{"role": role, "content": "?"}], {})
        except (jinja2.TemplateError, TypeError, ValueError):
            continue  # a role that it does not know; what else is wrong is said where a conversation needs it
        if (ids := written_ids(tokenizer, text)) and ids[0] in tokenizer.added_tokens_decoder:
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
    """Return the text after the content and the calls of a turn, up to the beginning of the model's next turn."""
    # An earlier turn of the model without its words and thoughts: a template may show less of them later.
    before = [
        {**{key: message[key] for key in message.keys() - KEYS_OF_THOUGHTS}, "content": "said"}
        if message["role"] == "assistant"
        else message
        for message in history
    ]
    turn: dict[str, Any] = {"role": "assistant", "content": SAID}
    begun, content, end = render(tokenizer, [*before, turn], options, answer=False).rpartition(SAID)
    if calls:
        turn["tool_calls"] = [with_arguments(call, lambda _: {}) for call in calls]
        called = render(tokenizer, [*before, turn], options, answer=False)
        while not called.endswith(end):  # what ends a turn with calls and one without
            end = end[1:]
        content = called.removeprefix(begun).removesuffix(end)
    whole = render(tokenizer, [*before, turn, *messages], options, answer=True)
    start, found, following = whole.rpartition(content or SAID)
    if not found or _THOUGHTS.sub("", start) != _THOUGHTS.sub("", begun):
        role = messages[0]["role"] if messages else "further"
        raise RewritingTemplateError(
            f"environment: found a chat template that changes earlier text when a {role} message follows, "
            "expected one that only adds text after the model's turn. Let the environment call tell() with the text."
        )
    return following


def thoughts(message: Message) -> str:
    """Return the thoughts of a turn, under whichever key they are. Empty: it has no thoughts.

    Raises UserError: the turn is not the model's, the thoughts are no text, or two keys have different thoughts.
    """
    found = {key: message[key] for key in KEYS_OF_THOUGHTS if message.get(key)}
    texts = {value for value in found.values() if isinstance(value, str)}
    if found and (len(texts) != 1 or message["role"] != "assistant"):
        key, remedy = ", ".join(found), f"Write them as {KEYS_OF_THOUGHTS[0]} alone, or leave them out."
        raise user_error(key, found=[*found.values()], expected="one text, in an assistant's message", remedy=remedy)
    return next(iter(texts), "")


def content_text(found: Any) -> str:
    """Return a message's content as text: null is an empty text. Raises UserError: a part of it is no text."""
    parts: list[Any] = [] if found is None else found if isinstance(found, list) else [found]
    texts = [one.get("text", one) if isinstance(one, dict) and one.get("type") == "text" else one for one in parts]
    if others := [text for text in texts if not isinstance(text, str)]:
        raise user_error("content", found=others[0], expected="only text", remedy="Leave it out, or write it as text.")
    return "".join(texts)


_Attempt = Callable[[Sequence[Message]], str | None]
"""Returns what the template writes for messages. None: it fails."""


def _in_known_roles(
    attempt: _Attempt, messages: Sequence[Message], given: Sequence[Message] | None = None
) -> Sequence[Message]:
    """Return the messages with roles that the template knows. `developer` becomes `system` if only this one is known.

    given: the original messages, for an error.

    Raises UserError: the template leaves out the content of a message, or does not know the message's role.
    """
    marked = [{**message, "content": f"\ue000{number}\ue001"} for number, message in enumerate(messages)]
    asked = [number for number, message in enumerate(marked) if message["role"] not in ("user", "assistant")]
    text = attempt(marked) if asked else None
    for number in asked:
        role, other = messages[number]["role"], {**marked[number], "role": "\ue000role\ue001"}
        if text is None:  # the template will say why, unless this role may be the reason
            known = role != "developer"
        elif known := marked[number]["content"] in text:
            known = role in ("system", "tool") or attempt([*marked[:number], other, *marked[number + 1 :]]) != text
        if not known and role == "developer":
            renamed = [{**message, "role": "system"} if message["role"] == role else message for message in messages]
            return _in_known_roles(attempt, renamed, messages)
        if not known and messages[number].get("content"):
            expected = "a role that the chat template writes at this place, because it leaves out this message"
            remedy = "Correct the role, or put the text into another message."
            raise user_error(f"messages.{number}", found=(given or messages)[number], expected=expected, remedy=remedy)
    return messages


def _readable(attempt: _Attempt, message: Message) -> dict[str, Any]:
    """Copy a message in the form that the template reads: its content as text, its thoughts under the template's key,
    and the arguments of its calls as objects, or else as JSON.

    Raises UserError: the content is no text, or the template leaves out thoughts, or all that the message has: calls.
    """
    remedy = "Leave them out, or put them into the content as the model writes them."
    copied = {**message, "content": content_text(message.get("content"))}
    if text := thoughts(message):
        turn = {"role": "assistant", "content": SAID}
        calling = {**turn, "tool_calls": [with_arguments({"id": SAID, "function": {"name": SAID}})]}
        names = [key for key in KEYS_OF_THOUGHTS if message.get(key)]
        tried = ((said, key) for said in (turn, calling) for key in (*names, *KEYS_OF_THOUGHTS[:3]))
        writes = (key for said, key in tried if THOUGHT in (attempt([ASKED, said | {key: THOUGHT}]) or ""))
        if (key := next(writes, None)) is None:
            raise user_error(names[0], found=text, expected="no thoughts, which the chat template omits", remedy=remedy)
        copied[key] = text
    if not (calls := copied.pop("tool_calls", None)):  # some templates take an empty list for calls
        return copied
    # The templates of DeepSeek put the arguments into the text as they are, and fail with an object. Those of V3 and R1
    # write calls only beside a content that is null.
    ways = (read_arguments, lambda found: json.dumps(read_arguments(found), ensure_ascii=False))
    forms = [{**copied, "tool_calls": [with_arguments(call, way) for call in calls]} for way in ways]
    forms += [{**form, "content": None} for form in forms if not copied["content"]]
    works = []
    for form in forms:
        if (written := attempt([ASKED, form])) is not None:
            if written != attempt([ASKED, copied | {"content": form["content"]}]):
                return form
            works.append(form)
    if works and not copied["content"]:
        raise user_error("tool_calls", calls, "none, which the chat template omits", remedy)
    return (works or forms)[0]


def _shared(tokenizer: PreTrainedTokenizerBase, turn: Sequence[int], following: Sequence[int]) -> int:
    """Count the first tokens of `following` with which the turn ends already. After them the turn may have one token
    that the template does not write. A blank that the template writes before the end of turn may be missing."""
    for written in (list(turn), list(turn[:-1])):
        for count in range(min(len(written), len(following)), 0, -1):
            if written[-count:] == list(following[:count]):
                return count
    blanks = next((n for n, token in enumerate(following) if text_of(tokenizer, [token]).strip()), 0)
    end = list(following[blanks : blanks + 1])
    return blanks + 1 if end and end == list(turn[-1:]) and end[0] in tokenizer.added_tokens_decoder else 0
