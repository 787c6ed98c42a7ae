"""Seeded speculation: an engine that computes drafts together, and keeps those that are drawn anyway.

A token is a function of its answer's seed, its position and its logits (`numerics.sampling`), and in exact mode a row
of logits does not depend on what is computed beside it. So a token is drawn behind every draft as in any other forward
pass, and a draft is accepted if it is the token that was drawn before it. What comes out is what would have come out
without drafts, whatever they are.

Registered with SGLang as a speculative algorithm. Drafts are chains, so their keys and values lie where those of
accepted tokens belong, and nothing is moved.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8rl.rollout.config import SpeculationSection
from fp8rl.rollout.engine.plugin.drafts import CONTEXT, DraftCost, Drafts, Ints
from fp8rl.rollout.engine.plugin.state import state

NAME = "FP8RL"
"""The name of the algorithm on SGLang's command line."""


def accepted(drafts: Tensor, drawn: Tensor) -> Tensor:
    """Return how many of the drawn tokens of each answer are kept, int64 [B], at least 1.

    drawn: int64 [B, W], behind the last token and behind each draft. drafts: [B, W - 1], -1 where there is none. Draft
    j stands where drawn token j would; what is drawn behind it is the answer's as long as the two are the same.
    """
    return 1 + (drafts == drawn[:, :-1]).long().cumprod(-1).sum(-1)


def register(speculation: SpeculationSection) -> None:
    """Make the algorithm known to SGLang in this process."""
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
        """Adds what SGLang 0.5.19 asks of its own algorithms and `CustomSpecAlgo` lacks."""

        def carries_draft_hidden_states(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        def has_draft_kv(self) -> bool:
            return False

        def create_future_map(self, device: Any, req_to_token_pool: Any, **needs: Any) -> Any:
            return FutureMap(device, self, req_to_token_pool, **needs)

    named = SpeculativeAlgorithm.register(NAME, supports_overlap=False, spec_class=Algorithm)
    named(lambda arguments: _worker(speculation))


def _worker(speculation: SpeculationSection) -> type:
    """The class of SGLang's worker; what it is made of is imported in the scheduler alone."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.runtime_context import get_schedule
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
    from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

    class Input(SpecInput):  # type: ignore[misc]
        """positions: of the tokens of a pass. Nothing is handed on from one pass to the next."""

        def __init__(self, positions: Tensor | None = None) -> None:
            super().__init__(SpecInputType.NGRAM_VERIFY)
            self.positions = positions

        def filter_batch(self, *unused: Any, **also: Any) -> None: ...

        def merge_batch(self, other: Any) -> None: ...

    class Worker(BaseSpecWorker):  # type: ignore[misc]
        """Stands between SGLang's scheduler and its model."""

        draft_worker = None

        def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
            super().__init__()
            self._target_worker = target_worker
            self.model_runner = target_worker.model_runner
            self._drafter = Drafter(speculation, get_schedule().chunked_prefill_size)

        def alloc_memory_pool(self, **pools: Any) -> None: ...

        def update_weights_from_tensor(self, request: Any) -> Any:
            return self._target_worker.update_weights_from_tensor(request)

        def update_weights_from_disk(self, request: Any) -> tuple[bool, str]:
            return True, "The target has them."

        def forward_batch_generation(self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None) -> Any:
            if batch.forward_mode.is_decode():
                result = self._decode(batch)
            else:
                result = self._target_worker.forward_batch_generation(batch)
                result.accept_lens = torch.ones(len(batch.reqs), dtype=torch.int32)
                result.new_seq_lens = batch.seq_lens.clone()
            result.next_draft_input, result.speculative_num_draft_tokens = Input(), speculation.width
            return result

        def _decode(self, batch: Any) -> Any:
            began = time.perf_counter()
            drafted = self._drafter.draft(batch)
            rows = Rows.of(batch, drafted, speculation.width)
            batch.input_ids, batch.out_cache_loc = rows.tokens, rows.slots(batch)
            batch.spec_info, batch.forward_mode = Input(rows.positions), ForwardMode.TARGET_VERIFY
            forward = ForwardBatch.init_new(batch, self.model_runner, return_hidden_states_before_norm=False)
            forward.extend_seq_lens, forward.seq_lens = rows.lengths, batch.seq_lens + rows.lengths
            result = self._target_worker.forward_batch_generation(None, forward, is_verify=True)
            rows.give_settings(forward)
            forward.forward_mode = ForwardMode.DECODE  # by which the sampler takes the positions
            drawn = rows.wide(self.model_runner.sample(result.logits_output, forward).long())
            kept = accepted(rows.wide(rows.tokens)[:, 1:], drawn)
            rows.widen(result.logits_output)
            result.next_token_ids, result.accept_lens = drawn.flatten().int(), kept.int()
            result.cap_lens = (rows.lengths - 1).int()  # SGLang hands on their sum
            result.new_seq_lens = batch.seq_lens + kept
            self._drafter.observe(drawn, kept, len(rows.tokens), time.perf_counter() - began)
            return result

    return Worker


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a pass: of each of B answers the last token and its drafts, one answer's after the other's."""

    tokens: Tensor
    """int64 [rows]"""
    positions: Tensor
    """int64 [rows]"""
    owner: Tensor
    """int64 [rows], the number of a row's answer."""
    lengths: Tensor
    """int64 [B], the rows of each answer."""
    real: Tensor
    """bool [B, W], the places of each answer, out of W, that have a row."""

    @classmethod
    def of(cls, batch: Any, drafts: Sequence[Sequence[int]], width: int) -> Rows:
        tokens = [t for request, each in zip(batch.reqs, drafts, strict=True) for t in (request.output_ids[-1], *each)]
        lengths = torch.tensor([1 + len(each) for each in drafts])
        real = torch.arange(width) < lengths[:, None]
        positions = (batch.seq_lens[:, None] + torch.arange(width))[real]
        owner = torch.arange(len(drafts)).repeat_interleave(lengths)
        return cls(torch.tensor(tokens), positions, owner, lengths, real)

    def slots(self, batch: Any) -> Tensor:
        """Return where the cache keeps keys and values of the rows; SGLang has reserved it."""
        table = batch.req_to_token_pool.req_to_token
        return table[batch.req_pool_indices[self.owner], self.positions].long()

    def give_settings(self, forward: Any) -> None:
        """Have each row sampled as its answer is."""
        info, owner = forward.sampling_info, self.owner
        per_answer = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
        forward.sampling_info = dataclasses.replace(info, **{name: getattr(info, name)[owner] for name in per_answer})
        if forward.return_logprob:
            forward.top_logprobs_nums = [forward.top_logprobs_nums[answer] for answer in owner.tolist()]
            forward.token_ids_logprobs = [forward.token_ids_logprobs[answer] for answer in owner.tolist()]

    def wide(self, values: Tensor) -> Tensor:
        """Values [rows] by answer and place, [B, W]; -1 where there is no row."""
        return torch.full(self.real.shape, -1, dtype=values.dtype).masked_scatter(self.real, values)

    def widen(self, output: Any) -> None:
        """Put what the sampler says beside its tokens in the places where SGLang looks for it."""
        if output.next_token_logprobs is not None:
            output.next_token_logprobs = self.wide(output.next_token_logprobs)
        for name in ("top_logprobs_val", "top_logprobs_idx", "token_ids_logprobs_val", "token_ids_logprobs_idx"):
            if values := getattr(output, f"next_token_{name}"):
                each, nothing = iter(values), values[0][:0]
                setattr(output, f"next_token_{name}", [next(each) if row else nothing for row in self.real.flatten()])


class Drafter:
    """Makes the drafts of a pass, and learns from what was drawn."""

    def __init__(self, speculation: SpeculationSection, most_rows: int) -> None:
        """most_rows: of a pass; what is above it is not drafted. Below 1: as many as there are."""
        self._speculation, self._most_rows = speculation, most_rows
        self._drafts, self._cost = Drafts(speculation.source), DraftCost()
        self._prompts: dict[str, int] = {}

    def draft(self, batch: Any) -> list[list[int]]:
        """Return what is drafted to each request of a batch."""
        requests, most = batch.reqs, self._speculation.drafts
        tails = [[*request.origin_input_ids[-CONTEXT:], *request.output_ids[-CONTEXT:]] for request in requests]
        self._contexts = np.array([([-1] * CONTEXT + tail)[-CONTEXT:] for tail in tails])
        known = self._prompts
        self._prompts = {r.rid: known.get(r.rid) or hash(tuple(r.origin_input_ids)) for r in requests}
        self._numbers = np.array(list(self._prompts.values()))
        self._version = int(state().weights.version or -1)
        if self._most_rows > 0:
            most = min(most, self._most_rows // len(requests) - 1)
        left = [request.sampling_params.max_new_tokens - len(request.output_ids) - 1 for request in requests]
        room = np.minimum(left, most if _by_logits_alone(batch.sampling_info) else 0)
        least = _agreed(self._cost.threshold(len(requests)))
        return self._drafts.draft(self._contexts, self._numbers, self._version, room, least)

    def observe(self, drawn: Tensor, kept: Tensor, rows: int, seconds: float) -> None:
        """Note what was drawn [B, W] in a pass, how many tokens of it were kept [B], and what it took."""
        wide, kept_ = np.concatenate((self._contexts, drawn.numpy()), 1), kept.numpy()
        windows: Ints = np.lib.stride_tricks.sliding_window_view(wide, CONTEXT, axis=1)[:, :-1]
        real = np.arange(drawn.shape[1]) < kept_[:, None]
        numbers = self._numbers.repeat(kept_)
        self._drafts.learn(windows[real], numbers, self._version, drawn.numpy()[real])
        self._cost.observe(rows, seconds)


def _by_logits_alone(info: Any) -> bool:
    """Return whether nothing else counts in the draw of a batch, such as penalties, which the tokens before change."""
    others = info.acc_additive_penalties, info.acc_scaling_penalties, info.logit_bias, info.grammars or None
    return not any(other is not None for other in others)


def _agreed(number: float) -> float:
    """Rank 0's number, on every rank."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return number
    shared = torch.tensor([number], dtype=torch.float64)
    torch.distributed.broadcast(shared, group.ranks[0], group.cpu_group)
    return shared.item()
