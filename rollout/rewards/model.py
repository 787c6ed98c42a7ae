"""The reward `model`: what a reward model says that SGLang serves."""

from __future__ import annotations

import asyncio
import functools
import os
from typing import TYPE_CHECKING, Any

from fp8rl.rollout.chat import render
from fp8rl.rollout.rewards.http import posted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def model(
    question: str,
    answers: list[str],
    url: str,
    tokenizer: str,
    label: int | None = None,
    key_variable: str | None = None,
) -> list[float]:
    """The logit that a sequence classifier gives each conversation of a question and an answer.

    SGLang 0.5.19 serves one with `--is-embedding`, at `/classify`. It is asked with token ids, all answers to a prompt
    at once, made by the reward model's own chat template: the policy's may be another. A Qwen2 or Qwen3 classifier must
    have `score.bias` in its file, zeros if need be: SGLang adds a random one where there is none (its issue 38768).

    Args:
        url: of the server, such as http://127.0.0.1:30000.
        tokenizer: the reward model's directory.
        label: which logit counts, from 0. None: the only one.
        key_variable: name of the environment variable that has the server's key, if it wants one.

    Raises:
        httpx.HTTPError: it does not answer, or with a status that is no success.
        ValueError: it gives several logits and `label` names none, or not one for each answer.
    """
    ids = await asyncio.to_thread(_rendered, tokenizer, question, answers)
    headers = {"Authorization": f"Bearer {os.environ[key_variable]}"} if key_variable else None
    said = await posted(url.rstrip("/") + "/classify", {"input_ids": ids}, headers)
    if not isinstance(said, list) or len(said) != len(answers):
        raise ValueError(f"found {str(said)[:200]}, expected {len(answers)} classifications, one per answer")
    return [_logit(each["embedding"], label) for each in said]


def _logit(logits: list[float], label: int | None) -> float:
    if (label is None and len(logits) != 1) or (label is not None and not 0 <= label < len(logits)):
        raise ValueError(
            f"found {len(logits)} logits of a reward model and label={label}, expected one, or a label below "
            f"{len(logits)}. Set kwargs.label"
        )
    return logits[label or 0]


def _rendered(directory: str, question: str, answers: list[str]) -> list[list[int]]:
    """The token ids of each conversation."""
    read = _tokenizer(directory)
    asked = {"role": "user", "content": question}
    found: list[list[int]] = []
    for answer in answers:
        conversation: list[dict[str, Any]] = [asked, {"role": "assistant", "content": answer}]
        found.append(read(render(read, conversation, {}, answer=False), add_special_tokens=False).input_ids)
    return found


@functools.cache
def _tokenizer(directory: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return loaded
