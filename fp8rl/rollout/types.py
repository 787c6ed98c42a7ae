"""Defines problems, requests to an engine, their results and their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rl.numerics.sampling import GREEDY
from fp8rl.rollout.tasks import chat
from fp8rl.rollout.tasks.chat import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EngineError(RuntimeError):
    """An engine refused a request, failed to answer it, or did not start."""


class EngineDiedError(EngineError):
    """The engine's process has ended. The message ends with the last lines of its log."""


class StaleWeightsError(EngineError):
    """Tokens were sampled with other weights than the trainer expects."""


class HandshakeError(EngineError):
    """The engine's configuration differs from the experiment's."""


@dataclass(frozen=True)
class Problem:
    """A question and its reference answer. (In GSM8K the answer is a solution that ends in `#### ` and the result.)"""

    question: str
    """The text of the question. In a conversation it is the user's last turn."""
    answer: str
    """The reference answer."""
    messages: Sequence[Message] = ()
    """The conversation that the model is to answer, with its system prompt. Empty: the question is the only turn."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the data, as JSON values."""
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the tokenizer's chat template."""

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The turns that the model is to answer."""
        return [dict(message) for message in self.messages] or [{"role": "user", "content": self.question}]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """Tokenize the problem's conversation by the chat template, up to the beginning of the assistant's turn."""
    return chat.prompt_ids(tokenizer, problem.conversation, problem.chat_template)


@dataclass(frozen=True)
class KeptTokens:
    """Tokens of the vocabulary for each of M draws: all that top-p, top-k or min-p kept, or the likeliest ones."""

    counts: Tensor
    """int32 [M], the number of tokens kept for each draw."""
    ids: Tensor
    """int32 [counts.sum()], the ids of the kept tokens, draw after draw."""
    logprobs: Tensor | None = field(default=None, repr=False)
    """float32 [counts.sum()], the engine's log-probabilities of the likeliest tokens; None for kept tokens."""

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]], logprobs: Sequence[float] | None = None) -> KeptTokens:
        ids = torch.tensor([token for kept in lists for token in kept], dtype=torch.int32)
        counts = torch.tensor([len(kept) for kept in lists], dtype=torch.int32)
        return cls(counts, ids, None if logprobs is None else torch.tensor(logprobs, dtype=torch.float32))

    def then(self, rest: KeptTokens) -> KeptTokens:
        both = None if self.logprobs is None or rest.logprobs is None else torch.cat([self.logprobs, rest.logprobs])
        return KeptTokens(torch.cat([self.counts, rest.counts]), torch.cat([self.ids, rest.ids]), both)

    def first(self, count: int) -> KeptTokens:
        """Return the kept tokens of the first `count` draws."""
        counts = self.counts[:count]
        ids = int(counts.sum())
        return KeptTokens(counts, self.ids[:ids], None if self.logprobs is None else self.logprobs[:ids])

    def lists(self) -> list[list[int]]:
        """Return the ids of each draw."""
        return [ids.tolist() for ids in self.ids.split(self.counts.tolist())]


@dataclass(frozen=True)
class Prompt:
    """A problem and its tokens, up to the beginning of the assistant's turn."""

    problem: Problem
    token_ids: list[int]


@dataclass(frozen=True)
class Group:
    """The answers to one prompt that are requested together."""

    prompt: Prompt
    seeds: tuple[int, ...]
    """The seed of each answer, from `numerics.sampling.answer_seed`. A retry keeps it. Greedy answers ignore it."""


def some_or_all(top_k: int) -> int:
    """Return a spec's top-k. Raises ValueError if it is 0 or 1. To keep only one token, set a temperature of 0."""
    if -1 < top_k < 2:
        raise ValueError(f"found {top_k}, expected 2 or more, or -1 for all. Greedy answers have a temperature of 0")
    return top_k


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of answers. Temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """An answer ends with the first of these tokens, which stays part of it. The stop tokens of the model's own
    configuration also end it."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    supports: bool = False
    """Whether the engine is to return, for each token, the set of tokens that it was drawn from."""
    likeliest: int = 0
    """How many of the likeliest tokens the engine is to return for each token, with their log-probabilities."""

    def to_request(self, seed: int | None = None, spent: int = 0) -> dict[str, Any]:
        """Return SGLang's `sampling_params` for an answer that already has `spent` tokens.

        Without a seed, the engine's plugin gives the answer one. No token ends an answer that is known beforehand
        (`numerics.sampling.canary_seed`).
        """
        return {
            "max_new_tokens": self.max_new_tokens - spent,
            "temperature": self.temperature,
            "stop_token_ids": list(self.stop_token_ids),
            "top_p": self.top_p,
            # SGLang says what a token was drawn from under a finite top-k only; this one leaves nothing out.
            "top_k": _FINITE if self.supports and self.top_k < 1 else self.top_k,
            "min_p": self.min_p,
            # Events only for the first and the last token of a streamed answer.
            "stream_interval": 1 << 30,
            "sampling_seed": seed,
            "ignore_eos": seed is not None and seed < GREEDY,
        }


@dataclass(frozen=True)
class Completion:
    """One answer of the engine: generated tokens, and the log-probability and weight version of each."""

    token_ids: list[int]
    """[T], the stop token included."""
    logprobs: list[float]
    """[T], at the temperature of the sampling."""
    weight_versions: list[int]
    """[T], the versions of the weights that sampled the tokens."""
    finished: bool
    """Whether a stop token ended the answer, not the length."""
    routed_experts: Tensor | None = field(default=None, repr=False)
    """int16 [P + T - 1, L, K], the experts of every token of prompt and answer, except the last, in the MoE layers in
    order. None if they were not requested."""
    aborted: bool = False
    """Whether a pause for an update ended the answer."""
    supports: KeptTokens | None = field(default=None, repr=False)
    """The tokens that each of the T tokens was drawn from, or the likeliest; None if they were not requested."""

    def then(self, rest: Completion) -> Completion:
        """Join this aborted answer with the engine's continuation after its last token."""
        return replace(
            rest,
            token_ids=self.token_ids + rest.token_ids,
            logprobs=self.logprobs + rest.logprobs,
            weight_versions=self.weight_versions + rest.weight_versions,
            supports=self.supports.then(rest.supports) if self.supports and rest.supports else rest.supports,
        )


@dataclass(frozen=True)
class Trajectory:
    """One answer with its prompt, as it was sampled. The model sampled M of its T tokens."""

    prompt_ids: list[int]
    """[P]."""
    token_ids: list[int]
    """[T], the tokens after the prompt, with the stop token if there is one."""
    logprobs: list[float]
    """[M]."""
    finished: bool
    """Whether a stop token or the environment ended the answer, not the length."""
    weight_versions: list[int]
    """[M]."""
    group: int
    """The index of the answer's group in the call that sampled it."""
    seed: int
    """The seed of the answer's draws."""
    routed_experts: Tensor | None = field(default=None, repr=False)
    """int16 [P + T - 1, L, K], as in `Completion`."""
    environment_spans: tuple[tuple[int, int], ...] = ()
    """(begin, end) of each span of `token_ids` from an environment, in order. The model sampled all other tokens."""
    stopped: bool = True
    """Whether a finished answer ends with a stop token."""
    outcome: dict[str, float] = field(default_factory=dict)
    """The result of the answer's environment."""
    failed: bool = False
    """Whether the answer's environment failed. The answer is then not trained on."""
    branch: int = 0
    """The number of this row among the rows of its conversation. Row 0 ended the conversation."""
    supports: KeptTokens | None = field(default=None, repr=False)
    """The tokens that each of the M tokens was drawn from, or the likeliest; None if they were not requested."""


_FINITE = (1 << 30) - 1
NO_WEIGHTS = -1
"""The version of an engine that started from a directory without weights. No trainer has this version, so the first
sync is a full one and sends every parameter."""
IDLE_S = 5.0
"""Seconds that a client keeps an idle connection. A server must keep it longer, because a request is lost if the server
closes the connection at that moment. By default SGLang closes it after 5 s."""


@dataclass(frozen=True)
class Endpoint:
    """The address of an engine, its key for generation and its key for administration. A repr hides the keys."""

    url: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    ranks: int = 1
    """Number of tensor-parallel processes of the engine."""
