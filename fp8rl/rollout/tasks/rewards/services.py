"""Rewards from services: `http`, any service of the user's, and `model`, a reward model that SGLang serves."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakKeyDictionary

import httpx
from pydantic import Field

from fp8rl.rollout.loopback import is_loopback
from fp8rl.rollout.tasks.chat import render
from fp8rl.rollout.tasks.tokens import written_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_URL = "^https?://"
_IDLE_S = 1.0
"""Seconds for which an idle connection is kept: services close theirs after 5 s or so, and a question that is asked
at that moment would be lost."""
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, httpx.AsyncClient]] = WeakKeyDictionary()
"""Two clients for each loop: one that goes by the environment's proxies, and one that does not."""


async def http(
    question: str,
    answer: str,
    reference: str,
    fields: Mapping[str, Any],
    finished: bool,
    tokens: int,
    turns: Sequence[Any],
    outcome: Mapping[str, float],
    url: Annotated[str, Field(pattern=_URL)],
) -> Any:
    """POST all of this as JSON to the service at `url`, and return its response: a number, or named numbers.

    Raises:
        httpx.HTTPError: it does not answer, or with a status that is no success.
    """
    asked = {"question": question, "answer": answer, "reference": reference, "fields": fields}
    more = {"finished": finished, "tokens": tokens, "turns": turns, "outcome": outcome}
    return await posted(url, asked | more)


async def posted(url: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    """POST JSON to a service, and return its JSON. Raises httpx.HTTPError, as `http` does."""
    clients, proxied = _clients.setdefault(asyncio.get_running_loop(), {}), not is_loopback(url)
    if proxied not in clients:
        limits = httpx.Limits(max_connections=256, keepalive_expiry=_IDLE_S)
        clients[proxied] = httpx.AsyncClient(timeout=None, limits=limits, trust_env=proxied)
    response = await clients[proxied].post(url, json=body, headers=headers)
    response.raise_for_status()
    return response.json()


async def model(
    question: str,
    answers: list[str],
    url: Annotated[str, Field(pattern=_URL)],
    tokenizer: str,
    label: Annotated[int, Field(ge=0)] | None = None,
    key_variable: str | None = None,
) -> list[float]:
    """Return the logit that a sequence classifier gives each conversation of a question and an answer.

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
    rewards: list[float] = []
    for logits in (each["embedding"] for each in said):
        if (label is None and len(logits) != 1) or (label is not None and not 0 <= label < len(logits)):
            raise ValueError(
                f"found {len(logits)} logits of a reward model and label={label}, expected one, or a label below "
                f"{len(logits)}. Set kwargs.label"
            )
        rewards.append(logits[label or 0])
    return rewards


def _rendered(directory: str, question: str, answers: list[str]) -> list[list[int]]:
    """Return the token ids of each conversation."""
    read = _tokenizer(directory)
    turns = [[{"role": "user", "content": question}, {"role": "assistant", "content": each}] for each in answers]
    return [written_ids(read, render(read, conversation, {}, answer=False)) for conversation in turns]


@functools.cache
def _tokenizer(directory: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return loaded
