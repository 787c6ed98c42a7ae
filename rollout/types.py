"""What goes into an engine and what comes out of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rollout.tasks import Problem


@dataclass(frozen=True)
class Prompt:
    """A problem and its tokens, up to where the assistant begins."""

    problem: Problem
    token_ids: list[int]


@dataclass(frozen=True)
class SamplingParams:
    """How answers are drawn. Temperature 0 is greedy.

    stop_token_ids: generation ends with the first of these (the EOS), which stays part of the answer. The stop tokens
        of the model's own configuration count as well.
    seed: each answer of a call gets its own `sampling_seed`, derived from this and the answer's place. Stock SGLang
        heeds it on CUDA only, under `--enable-deterministic-inference`, and ignores it elsewhere.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None

    def to_request(self, count: int) -> dict[str, Any] | list[dict[str, Any]]:
        """SGLang's `sampling_params` for `count` answers: one object for all, or one for each if there is a seed."""
        shared = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "stop_token_ids": list(self.stop_token_ids),
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            # Events only for the first and the last token of a streamed answer.
            "stream_interval": 1 << 30,
        }
        if self.seed is None:
            return shared
        return [{**shared, "sampling_seed": _seed_of(self.seed, index)} for index in range(count)]


@dataclass(frozen=True)
class Completion:
    """One answer of the engine: generated token ids (the stop token included), and for each of them its
    log-probability under the sampling temperature and the weight version that produced it.

    token_ids, logprobs, weight_versions: [T]; finished: a stop token ended it, not the length.
    routed_experts: int16 [P + T - 1, L, K], the experts of every token but the last, prompt included, in the MoE layers
        in order; None if they were not asked for.
    """

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finished: bool
    routed_experts: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Trajectory:
    """One sampled answer with its prompt.

    prompt_ids: [P]; token_ids (generated, with the stop token if one came), logprobs, weight_versions: [T].
    finished: a stop token ended the answer, not the length. group: index of its prompt in the call that sampled it.
    routed_experts: as in a Completion, int16 [P + T - 1, L, K].
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finished: bool
    weight_versions: list[int]
    group: int
    routed_experts: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Endpoint:
    """Where an engine listens, the key for generation and the key for administration (never shown in a repr)."""

    url: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)


def _seed_of(seed: int, index: int) -> int:
    return random.Random(f"{seed}:{index}").getrandbits(31)
