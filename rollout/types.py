"""What goes into an engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.sampling import GREEDY
from fp8rl.rollout.data.tasks import Problem


@dataclass(frozen=True)
class Supports:
    """The tokens that each of M tokens was drawn from, where top-p, top-k or min-p left some out.

    counts: int32 [M], how many. ids: int32 [counts.sum()], which, one token's after the other's.
    """

    counts: Tensor
    ids: Tensor

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Supports:
        ids = torch.tensor([token for each in lists for token in each], dtype=torch.int32)
        return cls(torch.tensor([len(each) for each in lists], dtype=torch.int32), ids)

    def then(self, rest: Supports) -> Supports:
        return Supports(torch.cat([self.counts, rest.counts]), torch.cat([self.ids, rest.ids]))

    def first(self, count: int) -> Supports:
        """Those of the first so many tokens."""
        counts = self.counts[:count]
        return Supports(counts, self.ids[: int(counts.sum())])

    def lists(self) -> list[list[int]]:
        """The ids by token."""
        return [each.tolist() for each in self.ids.split(self.counts.tolist())]


@dataclass(frozen=True)
class Prompt:
    """A problem and its tokens, up to where the assistant begins."""

    problem: Problem
    token_ids: list[int]


@dataclass(frozen=True)
class Group:
    """The answers that are asked for to one prompt.

    seeds: one for each answer, from `numerics.sampling.answer_seed`; greedy answers do not look at theirs. An answer
        that is asked for again, after whatever happened, keeps its own.
    """

    prompt: Prompt
    seeds: tuple[int, ...]


def some_or_all(top_k: int) -> int:
    """A top-k of a spec. Raises ValueError: it leaves none, or one, which is what a temperature of 0 is for."""
    if -1 < top_k < 2:
        raise ValueError(f"found {top_k}, expected 2 or more, or -1 for all. Greedy answers have a temperature of 0")
    return top_k


@dataclass(frozen=True)
class SamplingParams:
    """How answers are drawn. Temperature 0 is greedy.

    stop_token_ids: generation ends with the first of these (the EOS), which stays part of the answer. The stop tokens
        of the model's own configuration count as well.
    supports: have the engine say which tokens each one was drawn from.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    supports: bool = False

    def to_request(self, seed: int | None = None, spent: int = 0) -> dict[str, Any]:
        """SGLang's `sampling_params` of an answer of which `spent` tokens are there already.

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
class Decoding:
    """Forward passes that decoded an answer, tokens that were drafted in them, and drafts that were right."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Decoding) -> Decoding:
        return Decoding(self.passes + other.passes, self.drafted + other.drafted, self.accepted + other.accepted)


@dataclass(frozen=True)
class Completion:
    """One answer of the engine: generated token ids (the stop token included), and for each of them its
    log-probability under the sampling temperature and the weight version that produced it.

    token_ids, logprobs, weight_versions: [T]; finished: a stop token ended it, not the length. cut: neither did, but a
        pause for an update.
    routed_experts: int16 [P + T - 1, L, K], the experts of every token but the last, prompt included, in the MoE layers
        in order; None if they were not asked for.
    supports: of the T tokens; None if they were not asked for. decoding: of an engine that drafts.
    """

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finished: bool
    routed_experts: Tensor | None = field(default=None, repr=False)
    cut: bool = False
    supports: Supports | None = field(default=None, repr=False)
    decoding: Decoding = Decoding()

    def then(self, rest: Completion) -> Completion:
        """This one, which was cut, with what the engine has answered from its last token on."""
        return replace(
            rest,
            token_ids=self.token_ids + rest.token_ids,
            logprobs=self.logprobs + rest.logprobs,
            weight_versions=self.weight_versions + rest.weight_versions,
            supports=self.supports.then(rest.supports) if self.supports and rest.supports else rest.supports,
            decoding=self.decoding + rest.decoding,
        )


@dataclass(frozen=True)
class Trajectory:
    """One answer with its prompt, as it was sampled.

    prompt_ids: [P]. token_ids: [T], what follows, with the stop token if one came. told: spans of it, (begin, end) in
    order, that an environment wrote; the model has sampled the others, M of them.
    logprobs, weight_versions: [M].
    finished: a stop token or the environment ended the answer, not the length. stopped: of a finished one, its last
    token is a stop token. group: its group's place in the call that sampled it. seed: that its tokens were drawn with.
    routed_experts: as in a Completion, int16 [P + T - 1, L, K]. outcome: what its environment said of it. failed: its
    environment did, so that nothing can be learnt from it. branch: its number among the rows of one conversation, of
    which the first is the one that ended it. supports: of the M tokens, where they were asked for. decoding: as in a
    Completion.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finished: bool
    weight_versions: list[int]
    group: int
    seed: int
    routed_experts: Tensor | None = field(default=None, repr=False)
    told: tuple[tuple[int, int], ...] = ()
    stopped: bool = True
    outcome: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    branch: int = 0
    supports: Supports | None = field(default=None, repr=False)
    decoding: Decoding = Decoding()


@dataclass(frozen=True)
class Load:
    """What an engine says that it has to do: requests that run and that wait, and tokens in its KV cache."""

    running: int
    waiting: int
    tokens: int


_FINITE = (1 << 30) - 1
LOOPBACK = "127.0.0.1"
NO_WEIGHTS = -1
"""The version of an engine that has been sent no weights yet: its directory describes the model, and the first sync,
which is whole as no trainer ever has this version, brings every parameter."""
IDLE_S = 5.0
"""Seconds that a client keeps an idle connection. A server must keep it longer: by itself SGLang closes it after 5 s,
and a request that is sent at that moment is lost."""


@dataclass(frozen=True)
class Endpoint:
    """Where an engine listens, the key for generation and the key for administration (never shown in a repr).

    ranks: tensor-parallel processes of the engine.
    """

    url: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    ranks: int = 1
