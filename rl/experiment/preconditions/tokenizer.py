"""The tokenizer beside the weights: readable, with a chat template, an end of sequence and ids that the model has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp8rl.numerics.errors import UserError, user_error
from fp8rl.numerics.io.reading import check_path, check_regular
from fp8rl.numerics.time_limit import time_limit
from fp8rl.rollout.data.tasks import Problem, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDER_SECONDS = 5.0
"""A chat template is a program, which may loop for ever; a sound one takes a millisecond."""


def read_tokenizer(path: str | Path, vocab_size: int, key: str = "model.path") -> PreTrainedTokenizerBase:
    """The fast tokenizer in the model directory, with all that a run needs of it.

    Raises:
        UserError: it is missing or broken, or lacks something; the message speaks of the directory as `key`.
    """
    tokenizer = load_tokenizer(path, key)
    if not tokenizer.chat_template:
        raise _refusal(
            key,
            path,
            "a tokenizer without a chat template",
            "one, which renders the prompts",
            "Add chat_template to tokenizer_config.json.",
        )
    check_chat_template(tokenizer, path, key)
    if tokenizer.eos_token_id is None:
        raise _refusal(
            key,
            path,
            "a tokenizer without eos_token",
            "one, which ends an answer",
            "Add eos_token to tokenizer_config.json.",
        )
    if len(tokenizer) > vocab_size:
        raise _refusal(
            key,
            path,
            f"a tokenizer of {len(tokenizer)} tokens",
            f"at most the model's vocab_size = {vocab_size}",
            "Copy the tokenizer files that belong to the model.",
        )
    return tokenizer


def load_tokenizer(path: str | Path, key: str) -> PreTrainedTokenizerBase:
    """The fast tokenizer in a directory. Raises `UserError`: it is missing or cannot be read."""
    from transformers import AutoTokenizer

    check_path(path, key)
    if not (Path(path) / "tokenizer.json").is_file():
        raise user_error(
            key,
            found=f"{path} without tokenizer.json",
            expected="a fast tokenizer beside the weights",
            remedy="Copy the tokenizer files of the model into the directory.",
        )
    check_regular(Path(path), key)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception on a file that it cannot parse
        found = f"a tokenizer that cannot be read: {error}"
        raise _refusal(key, path, found, "whole files", "Copy them again.") from error
    return tokenizer


def check_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | Path, key: str) -> None:
    """Whether the chat template renders a question, soon, and differently for another question.

    Raises:
        UserError: it does not.
    """
    remedy = "Correct the chat template, or copy that of the model again."
    try:
        with time_limit(RENDER_SECONDS):
            prompts = [prompt_ids(tokenizer, Problem(question, "")) for question in ("2+3=?", "7*8=?")]
    except Exception as error:  # whatever a program may raise
        found = f"a chat template that fails: {type(error).__name__}: {error}"
        raise _refusal(key, path, found, "one that renders a user's question", remedy) from error
    if prompts[0] == prompts[1]:
        found = "a chat template that renders two questions alike"
        raise _refusal(key, path, found, "one that renders the user's question", remedy)


def _refusal(key: str, path: str | Path, found: str, expected: str, remedy: str) -> UserError:
    return user_error(f"{key}: tokenizer in {path}", found=found, expected=expected, remedy=remedy)
