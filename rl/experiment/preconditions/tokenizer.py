"""The tokenizer beside the weights: readable, with a chat template, an end of sequence and ids that the model has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from numerics.errors import UserError, user_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_tokenizer(path: str | Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """The fast tokenizer in the model directory.

    Raises:
        UserError: it is missing or broken, or lacks what a run needs of it.
    """
    from transformers import AutoTokenizer

    if not (Path(path) / "tokenizer.json").is_file():
        raise user_error(
            "model.path",
            found=f"{path} without tokenizer.json",
            expected="a fast tokenizer beside the weights",
            remedy="Copy the tokenizer files of the model into the directory.",
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # tokenizers raises plain Exception on a file that it cannot parse
        raise _refusal(path, f"a tokenizer that cannot be read: {error}", "whole files", "Copy them again.") from error
    if not tokenizer.chat_template:
        raise _refusal(
            path,
            "a tokenizer without a chat template",
            "one, which renders the prompts",
            "Add chat_template to tokenizer_config.json.",
        )
    if tokenizer.eos_token_id is None:
        raise _refusal(
            path,
            "a tokenizer without eos_token",
            "one, which ends an answer",
            "Add eos_token to tokenizer_config.json.",
        )
    if len(tokenizer) > vocab_size:
        raise _refusal(
            path,
            f"a tokenizer of {len(tokenizer)} tokens",
            f"at most the model's vocab_size = {vocab_size}",
            "Copy the tokenizer files that belong to the model.",
        )
    return tokenizer


def _refusal(path: str | Path, found: str, expected: str, remedy: str) -> UserError:
    return user_error(f"model.path: tokenizer in {path}", found=found, expected=expected, remedy=remedy)
