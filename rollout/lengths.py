"""Bounds on the number of tokens of a text, for texts that would take minutes to tokenize."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
