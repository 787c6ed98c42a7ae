"""The built-in reward functions, except `math`.

`integer`, `format`, `length` and `environment` follow rules. `http` asks a service of the user's. `model` asks a reward
model that SGLang serves.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakKeyDictionary

import httpx
from pydantic import AfterValidator, Field

from fp8rl.rollout.loopback import is_loopback
from fp8rl.rollout.tasks.chat import render
from fp8rl.rollout.tasks.named_functions import ReturnError
from fp8rl.rollout.tasks.rewards.mathematics import final_integer, results
from fp8rl.rollout.tasks.tokens import written_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_URL = "^https?://"
_IDLE_S = 1.0
"""Seconds for which a client keeps an idle connection. Services close theirs after about 5 s, and a request that is
sent at that moment would be lost."""
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, httpx.AsyncClient]] = WeakKeyDictionary()
"""Two clients for each event loop. One uses the proxies of the environment, the other does not."""


def integer(answer: str, reference: str, finished: bool) -> float:
    """Return 1 if the model ended the answer with `####` and the integer with which the reference ends, else 0."""
    gold = final_integer(reference)
    return float(finished and gold is not None and final_integer(answer) == gold)


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"a regular expression; this one has {error}") from error
    return pattern


def format(answer: str, finished: bool, pattern: Annotated[str, AfterValidator(_compiles)]) -> float:
    """Return 1 if the model ended the answer and the whole answer matches the regular expression `pattern`, else 0.

    In the pattern `.` matches every character.
    """
    return float(finished and re.fullmatch(pattern, answer, re.DOTALL) is not None)


def length(answer: str, tokens: int, free: Annotated[int, Field(ge=1)]) -> float:
    """Return min(0, 1 - tokens / free): 0 for up to `free` tokens, and -1 for twice as many."""
    return min(0.0, 1.0 - tokens / free)


def environment(answer: str, outcome: Mapping[str, float], part: str = "reward") -> float:
    """Return the number with the name `part` in the environment's result. A plain number has the name `reward`.

    The reward is 0 if the environment returned nothing, because the answer's tokens were used up. Raises ReturnError if
    the environment returned only other numbers.
    """
    if part not in outcome and outcome:
        raise ReturnError(f"found an environment that returned {', '.join(outcome)}, expected {part} (kwargs.part)")
    return outcome.get(part, 0.0)


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
    """POST the other arguments as JSON to the service at `url`. Return its response: a number, or named numbers. Raises
    httpx.HTTPError: the service does not answer, or answers with an error."""
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
    """Return for each answer the logit that a sequence classifier gives to question and answer.

    SGLang 0.5.19 serves a classifier with `--is-embedding`, at `/classify`. One request has all answers to a prompt, as
    token ids by the chat template of the reward model. The file of a Qwen2 or Qwen3 classifier must have `score.bias`,
    which may be zeros. Without it SGLang adds a random bias (its issue 38768).

    Args:
        url: address of the server, such as http://127.0.0.1:30000.
        tokenizer: directory of the reward model.
        label: index of the logit to return. None: there is only one.
        key_variable: name of the environment variable with the server's key, if it needs one.

    Raises:
        httpx.HTTPError: the server does not answer, or answers with an error.
        ValueError: the server returns no logit `label`, or several without a `label`, or none for an answer.
    """
    ids = await asyncio.to_thread(_rendered, tokenizer, question, answers)
    headers = {"Authorization": f"Bearer {os.environ[key_variable]}"} if key_variable else None
    items = await posted(url.rstrip("/") + "/classify", {"input_ids": ids}, headers)
    if not isinstance(items, list) or len(items) != len(answers):
        raise ValueError(f"found {str(items)[:200]}, expected {len(answers)} classifications, one per answer")
    rewards: list[float] = []
    for logits in (item["embedding"] for item in items):
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
    turns = [[{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for answer in answers]
    return [written_ids(read, render(read, conversation, {}, answer=False)) for conversation in turns]


@functools.cache
def _tokenizer(directory: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return loaded


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward function."""

    function: str
    """The function, as `package.module:name`."""
    cheap: bool = False
    """Whether the function is fast and safe, so that it needs no separate process."""
    reads: Callable[[str], bool] | None = None
    """Checks that the function can use a reference answer. None: it needs no reference."""
    reference: str = ""
    """The form of the reference, in words."""
    tokenizer: str = ""
    """The argument with a tokenizer's directory, which is read before a run starts. Empty: there is none."""


BUILT_IN = {
    "integer": BuiltIn(
        "fp8rl.rollout.tasks.rewards.builtin:integer",
        cheap=True,
        reads=lambda answer: final_integer(answer) is not None,
        reference="text that ends in '#### ' and an integer",
    ),
    "math": BuiltIn(
        "fp8rl.rollout.tasks.rewards.mathematics:math",
        # From nearly anything but blanks and an open box math-verify makes something to compare.
        reads=lambda answer: any(result.strip(" .$~%\\\t\r\n") for result in results(answer, stated=False)),
        reference="a result after '####' or in the last box that math-verify can read",
    ),
    "format": BuiltIn("fp8rl.rollout.tasks.rewards.builtin:format"),
    "length": BuiltIn("fp8rl.rollout.tasks.rewards.builtin:length", cheap=True),
    "environment": BuiltIn("fp8rl.rollout.tasks.rewards.builtin:environment", cheap=True),
    "http": BuiltIn("fp8rl.rollout.tasks.rewards.builtin:http"),
    "model": BuiltIn("fp8rl.rollout.tasks.rewards.builtin:model", tokenizer="tokenizer"),
}
