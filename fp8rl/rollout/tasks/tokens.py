"""Converts texts to tokens and back. No other file calls a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def written_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize a text that already has its special tokens, such as the text of a chat template."""
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize a text. Put the tokenizer's first tokens, such as the BOS, before it, unless it begins with them."""
    ids, put = written_ids(tokenizer, text), tokenizer(text).input_ids
    count = next((n for n in range(len(put)) if put[n : n + len(ids)] == ids), 0)
    return ids if ids[:count] == put[:count] else put[:count] + ids


def behind_ids(tokenizer: PreTrainedTokenizerBase, text: str, before: Sequence[int] = ()) -> list[int]:
    """Tokenize a text that follows other tokens, without a blank that the tokenizer would put before it.

    Some tokenizers put a blank before each text, or before a text after a special token. before: the tokens before the
    text. Empty: any tokens that are not special.
    """
    special = tokenizer.added_tokens_decoder.get(before[-1]) if before else None
    alone = written_ids(tokenizer, text)
    shown = text_of(tokenizer, alone)
    fronts = [special.content] if special else ["\n", "0", "a", "."] if shown[:1] == " " and shown != text else []
    for front in fronts:
        begun, whole = written_ids(tokenizer, front), written_ids(tokenizer, front + text)
        rest = whole[len(begun) :]
        if whole[: len(begun)] == begun and (special or " " + text_of(tokenizer, rest) == shown):
            return rest
    return alone


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, first: bool = False) -> str:
    """Return the exact text of tokens. first: they begin a text, so drop a blank that the tokenizer puts before it."""
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    before = [tokenizer.eos_token_id or 0]
    text: str = decode(list(ids)) if first else decode([*before, *ids]).removeprefix(decode(before))
    return text


# Bounds on the number of tokens of a text, for texts that would take minutes to tokenize.

TOKENS_PER_BYTE = 4
"""Largest number of tokens for a byte of text, in all tokenizers in use."""


def fewest_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> int:
    """Return the smallest number of tokens that a text of `size` bytes can have."""
    return -(-size // widest_token(tokenizer))


@lru_cache(maxsize=8)
def widest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of bytes of the longest token."""
    return max(len(token.encode()) for token in tokenizer.get_vocab())
