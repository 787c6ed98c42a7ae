"""Defines the `rollout:` section of an experiment spec."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from fp8rl.numerics.core.section import Section
from fp8rl.numerics.sampling import Truncation
from fp8rl.rollout.types import SamplingParams, some_or_all

GRAPH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Batch sizes, in answers, for which CUDA graphs are captured, unless the spec has `graph_batches`."""
CPU_CACHE_TOKENS = 32768
CPU_RUNNING = 64
"""Number of answers that an engine on a CPU samples at a time if the model keeps a state for each sequence."""
STATES_PER_ANSWER = 3
"""Number of states that SGLang 0.5.19 needs for each answer with a prefix cache: 1 for the answer, 2 for prefixes."""


class RolloutSection(Section):
    """Sampling parameters and the size of one SGLang engine."""

    engines: int = Field(default=1, ge=1, le=4096)
    """Number of SGLang servers. A group goes to the least busy engine. An engine that dies or hangs is replaced."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks of one engine. Each rank has complete experts. On GPUs several ranks run only in native
    mode. On CPUs they also run in exact mode, where the larger of `tp` and `trainer.tp` is a multiple of the other."""
    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts for each training step."""
    staleness: int = Field(default=0, ge=0, le=64)
    """How many steps sampling may be ahead of training. 0: a step samples, then trains. S: the groups of up to S + 1
    steps may be requested before the first of them is trained on. Training takes groups in order."""
    in_flight: bool | None = None
    """True: weights may change while an answer is sampled, so its tokens may come from several versions. False: all
    requested groups are answered before the update, so timing does not decide which weights sample a token. Null: false
    with a staleness of 0 or 1, else true. Only a staleness of 1 allows both values."""
    oversample: float = Field(default=1.0, ge=1.0, le=8.0)
    """Number of requested groups for each group that a step trains on. Above 1, a step takes the oldest complete groups
    and does not wait for the others, which continue with the new weights. This needs `in_flight`."""
    filter_patience: int = Field(default=10, ge=1)
    """The run ends if a step drops filter_patience · `prompts_per_step` groups."""
    group_size: int = Field(default=8, ge=1)
    """Answers to each prompt."""
    max_new_tokens: int = Field(default=20, ge=1)
    """Largest number of tokens of an answer, EOS included."""
    temperature: float = Field(default=1.0, gt=0.0, le=10.0)
    """The temperature of sampling and of all log-probabilities of a run."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw from the most probable tokens whose probabilities add up to top_p. 1 is off. Log-probabilities, entropy and
    gradients are computed over the truncated distribution ([agreement.md](agreement.md#top-p-top-k-and-min-p))."""
    top_k: Annotated[int, AfterValidator(some_or_all)] = Field(default=-1, ge=-1)
    """Draw from the top_k most probable tokens, and from tokens as probable as the last of them. -1 is off."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Draw from tokens whose probability is at least min_p times the largest one. 0 is off."""
    context_length: int = Field(default=1024, ge=1)
    """Most tokens of a prompt and its answer together."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Tokens for which one engine's KV cache has room. Null, on a GPU: as many as can be in use at once, if they fit
    (`fp8rl plan`). Null, on a CPU: 32,768, or `context_length` if that is larger."""
    memory_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Fraction of a GPU's memory that SGLang may fill with weights and cache. The rest, for prefills and CUDA graphs,
    must be free when SGLang starts. Null: SGLang's default, which depends on `chunked_prefill_size` and
    `graph_batches`."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Most answers that one engine samples at the same time. On a GPU it is at most the largest of `graph_batches`,
    because a larger batch would run without a CUDA graph. Null, on a GPU: the largest of `graph_batches`. Null, on a
    CPU: 64 for a model with linear attention, which keeps states for each answer, else SGLang's own number, which
    depends on the cache."""
    # Strictness would refuse the list that YAML gives.
    graph_batches: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(default=None, min_length=1, strict=False)
    """Batch sizes, in answers, for which a GPU captures a decode step as a CUDA graph. The graphs take 2 MiB for each
    answer of the largest batch. Null: eleven sizes up to 256, or up to `max_running_requests`. SGLang's own 36 sizes
    take three times as long to capture."""
    sleep: bool = False
    """Whether trainer and engines take turns on the GPUs that they share. While the trainer works, engines release
    weights, KV cache and CUDA graphs. While engines sample, the trainer has no gradients, and has its masters, moments
    and reference in host memory. A full, verified sync wakes the engines. Only with `staleness: 0`
    ([plan.md](plan.md#turns))."""
    chunked_prefill_size: int | None = Field(default=None, ge=1)
    """Most tokens of a prefill chunk. Null: SGLang's default."""
    prefix_cache: bool = True
    """Reuse the KV cache of common prefixes within one weight version."""
    start_timeout_s: float = Field(default=600.0, ge=10.0)
    """Seconds that a server may take to load the model and answer. Its imports alone take about 10 s. If a server
    exits, the run notices this at once."""
    hung_after_s: float = Field(default=120.0, ge=1.0)
    """An engine counts as hung, and is replaced, after this many seconds without a response, even to a health check. It
    does not respond while it loads weights. While its schedulers use a processor, as in a long forward pass, the limit
    is ten times as long."""
    restarts_per_hour: int = Field(default=8, ge=0)
    """How many lost engines are replaced within an hour. One more ends the run."""
    port: int | None = Field(default=None, ge=1024, le=65535)
    """Port of the server on the loopback interface. Null: a free port."""

    @model_validator(mode="after")
    def _updates_land_where_something_runs(self) -> RolloutSection:
        if self.in_flight is not None and self.in_flight != (self.staleness > 1) and self.staleness != 1:
            raise ValueError(
                f"found in_flight={str(self.in_flight).lower()} with staleness={self.staleness}, expected "
                f"{str(not self.in_flight).lower()}, the only value with this staleness. Remove rollout.in_flight"
            )
        if self.oversample > 1.0 and not self.updates_in_flight:
            raise ValueError(
                f"found oversample={self.oversample:g} with staleness={self.staleness} and in_flight=false, expected "
                "in_flight=true, because groups that a step does not take continue during the update. Set "
                "rollout.staleness=1 and rollout.in_flight=true"
            )
        return self

    @model_validator(mode="after")
    def _graphs_are_used(self) -> RolloutSection:
        running, graphs = self.max_running_requests, self.graph_batches
        if running is not None and graphs is not None and max(graphs) > running:
            raise ValueError(
                f"found graph_batches up to {max(graphs)} with max_running_requests={running}, expected batches of at "
                f"most {running}. Lower rollout.graph_batches or raise rollout.max_running_requests"
            )
        return self

    @property
    def graphs(self) -> tuple[int, ...]:
        """`graph_batches`, or by default `GRAPH_BATCHES` up to `max_running_requests`."""
        if self.graph_batches is not None:
            return self.graph_batches
        most = min(self.max_running_requests or max(GRAPH_BATCHES), max(GRAPH_BATCHES))
        return (*(batch for batch in GRAPH_BATCHES if batch < most), most)

    @property
    def limit(self) -> str:
        """The key that limits the length of an answer, and its value, for messages."""
        return f"rollout.max_new_tokens={self.max_new_tokens}"

    @property
    def longest_pass_s(self) -> float:
        """Seconds that an engine may compute without a response before it counts as hung."""
        return 10 * self.hung_after_s

    @property
    def cache_tokens(self) -> int:
        """`max_total_tokens` or, if it is null, the default on a CPU."""
        return self.max_total_tokens or max(CPU_CACHE_TOKENS, self.context_length)

    def running(self, cuda: bool) -> int | None:
        """Return the number of answers that an engine samples at a time. None: SGLang's own number."""
        return max(self.graphs) if cuda else self.max_running_requests

    def states(self, cuda: bool) -> int:
        """Return how many states of sequences an engine has, if the model has states in addition to a KV cache."""
        return (self.running(cuda) or CPU_RUNNING) * (STATES_PER_ANSWER if self.prefix_cache else 1)

    @property
    def updates_in_flight(self) -> bool:
        """`in_flight` or, if it is null, the default for `staleness`."""
        return self.staleness > 1 if self.in_flight is None else self.in_flight

    @property
    def truncation(self) -> Truncation:
        """The limits on the tokens from which answers for training are drawn."""
        return Truncation(self.top_p, self.top_k, self.min_p)

    def sampling(self, temperature: float, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Return the sampling parameters at `temperature`. 0 is greedy and ignores top-p, top-k and min-p."""
        greedy = SamplingParams(self.max_new_tokens, temperature, stop_token_ids)
        if temperature == 0:
            return greedy
        return replace(greedy, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)
