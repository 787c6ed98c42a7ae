"""Problems, the requests of an engine, their results and their errors."""

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
    """The engine refused or failed a request, or did not come up."""


class EngineDiedError(EngineError):
    """The engine's process is gone. The message ends with the last lines of its log."""


class StaleWeightsError(EngineError):
    """Tokens were sampled by other weights than the trainer expects."""


class HandshakeError(EngineError):
    """The engine does not run what the experiment says it runs."""


@dataclass(frozen=True)
class Problem:
    """A question and its reference answer, in GSM8K a solution that ends in `#### ` and the result."""

    question: str
    """The question's text; in a conversation, its last user turn."""
    answer: str
    """The reference answer."""
    messages: Sequence[Message] = ()
    """The conversation that the model is to answer, a system prompt included; empty: the question as one user turn."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The data's further columns, as JSON values."""
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the tokenizer's chat template."""

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Return the turns that the model is to answer."""
        return [dict(message) for message in self.messages] or [{"role": "user", "content": self.question}]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """Tokenize the problem's conversation by the chat template, up to where the assistant begins."""
    return chat.prompt_ids(tokenizer, problem.conversation, problem.chat_template)


@dataclass(frozen=True)
class KeptTokens:
    """Tokens of the vocabulary for each of M draws: those that top-p, top-k or min-p kept, or the likeliest ones."""

    counts: Tensor
    """int32 [M], the number of tokens kept for each draw."""
    ids: Tensor
    """int32 [counts.sum()], the ids of the kept tokens, draw after draw."""
    logprobs: Tensor | None = field(default=None, repr=False)
    """float32 [counts.sum()], the engine's log-probabilities of the likeliest tokens; None for those that were kept."""

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
    """A problem and its tokens, up to where the assistant begins."""

    problem: Problem
    token_ids: list[int]


@dataclass(frozen=True)
class Group:
    """The answers to one prompt that are requested together."""

    prompt: Prompt
    seeds: tuple[int, ...]
    """The seed of each answer, from `numerics.sampling.answer_seed`. A retry keeps it; greedy answers ignore it."""


def some_or_all(top_k: int) -> int:
    """Return a spec's top-k. Raises ValueError if it keeps no token, or one: a temperature of 0 is for that."""
    if -1 < top_k < 2:
        raise ValueError(f"found {top_k}, expected 2 or more, or -1 for all. Greedy answers have a temperature of 0")
    return top_k


@dataclass(frozen=True)
class SamplingParams:
    """The sampling of answers. Temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with the first of these (the EOS), which stays part of the answer. The stop tokens of the model's
    own configuration count as well."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    supports: bool = False
    """Whether the engine is to return, for each token, the set of tokens that it was drawn from."""
    likeliest: int = 0
    """How many of the likeliest tokens the engine is to return for each token, with their log-probabilities."""

    def to_request(self, seed: int | None = None, spent: int = 0) -> dict[str, Any]:
        """Return SGLang's `sampling_params` of an answer that has `spent` tokens already.

        Without a seed, the engine's plugin gives it one. No token ends an answer that is known beforehand
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
    """[T], under the sampling temperature."""
    weight_versions: list[int]
    """[T], the versions that produced the tokens."""
    finished: bool
    """A stop token ended the answer, not the length."""
    routed_experts: Tensor | None = field(default=None, repr=False)
    """int16 [P + T - 1, L, K], the experts of every token but the last, prompt included, in the MoE layers in order;
    None if they were not requested."""
    aborted: bool = False
    """A pause for an update ended the answer."""
    supports: KeptTokens | None = field(default=None, repr=False)
    """The tokens that each of the T tokens was drawn from, or the likeliest; None if they were not requested."""

    def then(self, rest: Completion) -> Completion:
        """Join this answer, which was aborted, with the engine's continuation from its last token on."""
        return replace(
            rest,
            token_ids=self.token_ids + rest.token_ids,
            logprobs=self.logprobs + rest.logprobs,
            weight_versions=self.weight_versions + rest.weight_versions,
            supports=self.supports.then(rest.supports) if self.supports and rest.supports else rest.supports,
        )


@dataclass(frozen=True)
class Trajectory:
    """One answer with its prompt, as it was sampled. M of its T tokens are the model's."""

    prompt_ids: list[int]
    """[P]."""
    token_ids: list[int]
    """[T], the tokens after the prompt, with the stop token if one came."""
    logprobs: list[float]
    """[M]."""
    finished: bool
    """A stop token or the environment ended the answer, not the length."""
    weight_versions: list[int]
    """[M]."""
    group: int
    """The index of the answer's group in the call that sampled it."""
    seed: int
    """The seed of its draws."""
    routed_experts: Tensor | None = field(default=None, repr=False)
    """As in a Completion, int16 [P + T - 1, L, K]."""
    environment_spans: tuple[tuple[int, int], ...] = ()
    """Spans of `token_ids`, (begin, end) in order, that an environment wrote. The model sampled all other tokens."""
    stopped: bool = True
    """Whether a finished answer ends with a stop token."""
    outcome: dict[str, float] = field(default_factory=dict)
    """The result of the answer's environment."""
    failed: bool = False
    """Whether the answer's environment failed, so that the answer cannot be trained on."""
    branch: int = 0
    """The number of this row among the rows of one conversation; row 0 is the row that ended the conversation."""
    supports: KeptTokens | None = field(default=None, repr=False)
    """The tokens that each of the M tokens was drawn from, or the likeliest; None if they were not requested."""


@dataclass(frozen=True)
class Load:
    """The load of an engine: requests that run and that wait, and tokens in its KV cache."""

    running: int
    waiting: int
    tokens: int


_FINITE = (1 << 30) - 1
NO_WEIGHTS = -1
"""The version of an engine that has been sent no weights yet: its directory only describes the model. No trainer ever
has this version, so the first sync is a full one and brings every parameter."""
IDLE_S = 5.0
"""Seconds that a client keeps an idle connection. A server must keep it longer. SGLang's default is to close it
after 5 s, and a request that is sent at that moment is lost."""


@dataclass(frozen=True)
class Endpoint:
    """The address of an engine, the key for generation and the key for administration (never shown in a repr)."""

    url: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    ranks: int = 1
    """Tensor-parallel processes of the engine."""
