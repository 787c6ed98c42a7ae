"""Checks that a model's tokenizer can be read, and has a chat template, an end of sequence and only the model's ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from jinja2 import Environment, meta
from jinja2.ext import loopcontrols

from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.process import memory_limit, time_limit
from fp8rl.numerics.core.reading import check_path, check_regular
from fp8rl.rollout.tasks.chat import SAID, THOUGHT, TODAY, Message, RewritingTemplateError, continuation_ids, render
from fp8rl.rollout.tasks.data import Source
from fp8rl.rollout.types import Problem, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SECONDS, _BYTES = 5.0, 1 << 30


@contextmanager
def rendering() -> Iterator[None]:
    """Limit the time and memory of a chat template inside the block. A template is a program that may loop for ever or
    ask for gigabytes of blanks; a correct template takes a millisecond and some kilobytes."""
    with time_limit(_SECONDS), memory_limit(_BYTES):
        yield


def read_tokenizer(path: str | Path, vocab_size: int, key: str = "model.path") -> PreTrainedTokenizerBase:
    """Read the fast tokenizer in the model directory, and check that it has all that a run needs. Raises UserError: the
    tokenizer is missing or broken, or lacks something; the message names the directory as `key`."""
    tokenizer = load_tokenizer(path, key)
    if not tokenizer.chat_template:
        found, expected = "a tokenizer without a chat template", "a chat template, which renders the prompts"
        raise _refusal(key, path, found, expected, "Add chat_template to tokenizer_config.json.")
    check_chat_template(tokenizer, path, key)
    if tokenizer.eos_token_id is None:
        found, expected = "a tokenizer without eos_token", "eos_token, which ends an answer"
        raise _refusal(key, path, found, expected, "Add eos_token to tokenizer_config.json.")
    if len(tokenizer) > vocab_size:
        found, expected = f"a tokenizer of {len(tokenizer)} tokens", f"at most the model's vocab_size = {vocab_size}"
        raise _refusal(key, path, found, expected, "Copy the tokenizer files that belong to the model.")
    return tokenizer


def load_tokenizer(path: str | Path, key: str) -> PreTrainedTokenizerBase:
    """Read the fast tokenizer in a directory. Raises `UserError`: the tokenizer is missing or cannot be read."""
    from transformers import AutoTokenizer

    check_path(path, key)
    if not (Path(path) / "tokenizer.json").is_file():
        remedy = "Copy the tokenizer files of the model into the directory."
        raise user_error(key, f"{path} without tokenizer.json", "a fast tokenizer beside the weights", remedy)
    check_regular(Path(path), key)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception on a file that it cannot parse
        found = f"a tokenizer that cannot be read: {error}"
        raise _refusal(key, path, found, "whole files", "Copy them again.") from error
    return tokenizer


def check_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | Path, key: str) -> None:
    """Raise `UserError` unless the chat template renders a question in time, and another question differently."""
    remedy = "Correct the chat template, or copy the model's own again."
    try:
        with rendering():
            prompts = [prompt_ids(tokenizer, Problem(question, "")) for question in ("2+3=?", "7*8=?")]
    except Exception as error:  # whatever a program may raise
        found = f"a chat template that fails: {type(error).__name__}: {error}"
        raise _refusal(key, path, found, "one that renders a user's question", remedy) from error
    if prompts[0] == prompts[1]:
        found = "a chat template that renders two questions alike"
        raise _refusal(key, path, found, "one that renders the user's question", remedy)


def _refusal(key: str, path: str | Path, found: str, expected: str, remedy: str) -> UserError:
    return user_error(f"{key}: tokenizer in {path}", found=found, expected=expected, remedy=remedy)


# Checks whether the chat template uses the settings of the data, and how it continues a conversation.

_PASSED_BY_US = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception",
    "strftime_now",
}  # fmt: skip
"""Names that `apply_chat_template` gives to a chat template."""
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Tags of `transformers` in a chat template, which mark the text that the model writes."""


def check_template(tokenizer: PreTrainedTokenizerBase, source: Source) -> None:
    """Raise `UserError` unless the chat template reads a source's arguments and renders its system prompt."""
    if not source.chat_template and not source.system_prompt:
        return
    if source.chat_template:
        template = _GENERATION.sub("", tokenizer.get_chat_template())
        variables = meta.find_undeclared_variables(Environment(extensions=[loopcontrols]).parse(template))
        read = sorted(variables - _PASSED_BY_US - set(tokenizer.special_tokens_map))
        if unread := [name for name in source.chat_template if name not in read]:
            expected = f"what the chat template of model.path reads: {', '.join(read) or 'it has no arguments'}"
            raise user_error(f"{source.key}: chat_template", unread[0], expected, "Correct data.chat_template.")
    user = {"role": "user", "content": "2+3=?"}
    for key, system in (("chat_template", ""), ("system_prompt", source.system_prompt)):
        turns = [{"role": "system", "content": system}, user] if system else [user]
        found = source.chat_template if key == "chat_template" else system
        try:
            with rendering():
                prompt_ids(tokenizer, Problem("", "", turns, chat_template=source.chat_template))
        except Exception as error:  # whatever a program may raise
            expected = f"what the chat template of model.path renders; it fails: {type(error).__name__}: {error}"
            if isinstance(error, UserError):
                expected = "none, as the chat template of model.path leaves system prompts out"
            remedy = f"Correct or remove data.{key}."
            raise user_error(f"{source.key}: {key}", found=found, expected=expected, remedy=remedy) from error


def template_remarks(
    tokenizer: PreTrainedTokenizerBase, conversation: Sequence[Message], source: Source, several_turns: bool
) -> Iterator[str]:
    """Yield remarks on the chat template that a user should know.

    conversation: a problem's conversation. several_turns: messages follow the model's first turn.
    """
    key, options = source.key, source.chat_template
    if "strftime_now" in tokenizer.get_chat_template() and "date_string" not in options:
        yield (
            f"{key}: the chat template writes today's date; prompts of a run all have {TODAY:%d %B %Y}, "
            "so that they do not depend on the day"
        )
    if not several_turns:
        return
    user = {"role": "user", "content": "?"}
    try:
        continuation_ids(tokenizer, conversation, [], [user], options)
    except RewritingTemplateError:
        yield (
            f"{key}: the chat template changes earlier text when a message follows the model's turn. message() is "
            "refused; tell() appends a text as it is. A harness's requests become rows of their own"
        )
        return
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        yield f"{key}: the chat template cannot render a user message after the model's turn: {error}"
        return
    thinking = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"}
    first = render(tokenizer, [*conversation, thinking], options, answer=False)
    later = render(tokenizer, [*conversation, thinking, user], options, answer=True)
    if THOUGHT in first and THOUGHT not in later:
        yield (
            f"{key}: the chat template leaves thoughts out of earlier turns. Conversations of this run keep "
            "them, as the model has sampled them"
        )
