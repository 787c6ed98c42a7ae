"""One rank of a model, and its passes over batches: what a trainer, a critic and a frozen reference have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from fp8rl.models import read_model
from fp8rl.models.shared_base import SharedBase
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.memory import NAN, give_back, placeholders
from fp8rl.numerics.core.process import all_gathered
from fp8rl.numerics.weight_cache import WeightCache
from fp8rl.trainer import device
from fp8rl.trainer.config import CHUNKS, TrainerSpec
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.megatron.lowering import lower
from fp8rl.trainer.megatron.model import build_model
from fp8rl.trainer.megatron.model_checks import check_layout, check_rows
from fp8rl.trainer.modules.precision import Precision, count, kv_saturated
from fp8rl.trainer.step.batch import OWN_LIKELY, NonFiniteLossError, Objective, PassResult, Scored, TokenBatch
from fp8rl.trainer.step.head import Head, HeadOutput, gpt_of, head_of, hidden_states, read_logprobs
from fp8rl.trainer.step.microbatches import MicroBatch
from fp8rl.trainer.step.routing import Routing, routing_of
from fp8rl.trainer.step.trees import form_of, with_tree_ratio
from fp8rl.trainer.weights.hf_weights import HFWeights


class Scorer:
    """Scores batches with one model on this rank. Every public method needs all ranks, with equal arguments.

    Attributes:
        definition: the description of the model, from its config. model: this rank's part of Megatron's model.
        cache: the quantized weights that the forward pass uses.
        placed: the base that it shares with engines (`weight_sync.frozen.MappedBase`). None: it shares no weights.
    """

    placed: Any = None

    def __init__(self, spec: TrainerSpec, layout: Layout) -> None:
        """Build the model and load its weights. With a shared base none are loaded: `adopt` must read them from it, and
        until then they are NaN, without memory.

        Raises UserError: the directory, the layout or the sizes do not fit together.
        """
        config, numerics, longest = spec.config, spec.numerics, spec.max_sequence_length
        self.config, self.numerics, self.layout, self.max_sequence_length = config, numerics, layout, longest
        self.definition = read_model(spec.model_path).adapted(spec.adapter)
        sizes = self.definition.sizes
        check_layout(self.definition.shape, config, numerics.trainer_spec)
        check_rows(config, numerics.mode, device.has_transformer_engine())
        if longest > sizes.max_positions:
            expected = f"at most {sizes.max_positions}, the model's {sizes.limit}"
            remedy = "Lower rollout.context_length, or use a model with more positions."
            raise user_error("max_sequence_length", longest, expected, remedy)
        self.cache = WeightCache()
        self.lowering = lower(numerics, device.has_transformer_engine())
        self.precision = Precision(numerics, self.cache, sizes.layers)
        with placeholders(NAN) if spec.shared_base else nullcontext():
            self.model = build_model(self.definition, config, self.precision, self.lowering, longest, spec.dtype)
        weight = numerics.spec.weight
        self.weights = HFWeights(spec.model_path, self.definition, weight, self.cache, layout, spec.dtype)
        self._waits = spec.shared_base
        if not spec.shared_base:
            self.weights.load(self.model)
        self._finish(self.model)
        self._runs: nn.Module = self.model
        """The module that Megatron's schedule runs: the model or its data-parallel wrapper."""

    def score(self, batch: TokenBatch) -> tuple[list[int], Tensor]:
        """Return the numbers of this rank's rows, and their log-probabilities, fp32 [len(rows), S]."""
        rows, scored = self.score_routed(batch)
        return rows, scored.logprobs

    def score_routed(self, batch: TokenBatch) -> tuple[list[int], Scored]:
        """Like `score`. Also return the router's own choice if the batch has routes, and draws if it has seeds."""
        self._check_width(batch)
        with torch.no_grad():
            done = self._pass(batch, None)
        return done.rows, done.result

    def weights_changed(self) -> None:
        """Discard all quantized weights. Code that changes parameters must call this."""
        self.cache.drop()

    def adopt(self, base: SharedBase) -> int:
        """Read the frozen weights from a base that engines read too. Return the bytes of weights that cannot be shared.

        If numerics change later, the codes in the base do not change, only their use.
        """
        kept = self.weights.adopt(self.model, base, self._waits)
        self._waits = False
        self.weights_changed()
        give_back()
        return kept

    def set_numerics(self, numerics: NumericsConfig) -> None:
        """Switch to another precision or spec, with the same weights and in the same mode. Raises UserError, and
        changes nothing, if the model's sizes do not fit the spec."""
        check_layout(self.definition.shape, self.config, numerics.trainer_spec)
        te_runtime.switch(self.lowering, lower(numerics, self.lowering.transformer_engine), self.model.config)
        self.numerics = self.precision.numerics = numerics
        self.weights_changed()

    def _finish(self, model: GPTModel) -> None:
        """Change the model after its weights are loaded. A subclass may override this."""

    def _pass(self, batch: TokenBatch, objective: Objective | None) -> RankPass:
        """Score this rank's rows of the batch. With an objective, also sum its gradients in the buffers of `_runs`.

        Raises:
            NonFiniteLossError: the loss of some micro-batches is not finite. All ranks raise it, with the rows of these
                micro-batches.
            ValueError: this model cannot take the batch's routes (:func:`trainer.step.routing.routing_of`).
        """
        model, layout, config = self._runs, self.layout, self.config
        # On each tensor-parallel rank, a row of the model's input is padded to a multiple of this number.
        multiple, form = layout.tp_size * self.lowering.row_multiple, form_of(config)
        if layout.cp_size > 1:
            multiple = layout.cp_size * math.lcm(multiple, CHUNKS)
        if objective is None:
            batch = replace(batch, fields={})  # nobody reads them
        groups = form.plan(batch, layout.replicas, config.micro_batch_tokens, multiple)[layout.replica]
        # Gradients are added over ranks without dividing by a token count: the objective has its own denominators.
        get_model_config(model).finalize_model_grads_func = lambda model, tokens, **more: finalize_model_grads(
            model, None, **more
        )
        counting = objective is not None and config.router_bias_rate > 0
        with routing_of(model, batch, layout, counting) as routing:
            # Only the last stage sees logits. The shapes of each micro-batch replace the shapes given here.
            outputs: list[_MicroOutput] = get_forward_backward_func()(
                forward_step_func=partial(self._forward, objective=objective, routing=routing),
                data_iterator=(form.of(batch, rows, multiple) for rows in groups),
                model=[model],
                num_microbatches=len(groups),
                seq_length=batch.width,
                micro_batch_size=1,
                forward_only=objective is None,
            )
        loss, metrics = (0.0, {}) if objective is None else _reduce(outputs, layout)
        rows = [row for output in outputs for row in output.rows]
        place = {row: at for at, row in enumerate(rows)}
        parts = [([place[row] for row in output.rows], output) for output in outputs]
        scored = Scored.assembled(parts, batch, len(rows))
        if routing.loads is not None:
            dist.all_reduce(routing.loads, group=layout.dp_group)
        if objective is not None and self.numerics.kv_format.quantized:
            metrics["train/kv_saturated"] = kv_saturated(model)
        metrics = with_tree_ratio(metrics, batch)
        return RankPass(rows, PassResult(**vars(scored), metrics=metrics, loss=loss), routing.loads)

    def _forward(
        self, micro_batches: Iterator[MicroBatch], model: nn.Module, objective: Objective | None, routing: Routing
    ) -> Any:
        """Run one micro-batch for Megatron's schedule. Return the hidden states, and the function of the loss."""
        micro = next(micro_batches)
        codes = self.numerics.kv_format.quantized  # keys and values in FP8, of which those that saturate are counted
        routing.begin(micro)
        if codes and objective is not None:
            count(model, micro.real_in_model())
        hidden = hidden_states(model, micro)
        if codes:
            count(model, None)
        routes = routing.own_choice(micro)

        def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, _MicroOutput]:
            """Return what Megatron expects: the loss, an unused number of tokens, and results to keep."""
            batch, found = micro.batch, self._read_head(hidden, head_of(gpt_of(model)), micro)
            real = torch.arange(1, batch.width, device=hidden.device) < batch.lengths[:, None]
            logprobs = F.pad(torch.where(real, found.values, 0.0), (1, 0))
            metrics: dict[str, Tensor] = {}
            if objective is None or not micro.rows:
                loss = logprobs.sum() * 0.0
            else:
                if found.likely is not None:
                    batch = batch.with_fields(**{OWN_LIKELY: F.pad(found.likely, (0, 0, 1, 0))})
                own = objective(logprobs, F.pad(torch.where(real, found.entropy, 0.0), (1, 0)), batch)
                loss = own.loss
                metrics = {name: value.detach() for name, value in (own.metrics | micro.metrics()).items()}
            kept = _MicroOutput(micro.rows, logprobs.detach(), loss.detach().float(), metrics, routes, found.draws)
            return loss, torch.zeros([], dtype=torch.int, device=loss.device), kept

        return hidden, loss_of

    def _read_head(self, hidden: Tensor, head: Head, micro: MicroBatch) -> HeadOutput:
        """Return the head's output for the final hidden states of a micro-batch."""
        return read_logprobs(hidden, head, micro, self.config.head_chunk_tokens)

    def _check_width(self, batch: TokenBatch) -> None:
        if batch.width > self.max_sequence_length:
            raise ValueError(
                f"batch: found rows of {batch.width} tokens, expected at most max_sequence_length="
                f"{self.max_sequence_length}. Start the trainer with a larger max_sequence_length"
            )


# One forward and, with a loss, backward pass over this rank's rows of a batch, by Megatron's schedule.


@dataclass(frozen=True)
class RankPass:
    """The result of a pass on one rank."""

    rows: list[int]
    """Numbers of the batch's rows that this rank's data-parallel replica has."""
    result: PassResult
    """Tensors have only these rows, in this order. Loss and metrics are for the whole batch, on every rank."""
    loads: Tensor | None = None
    """int64 [layers of this stage, E], how many of the batch's tokens chose each expert. None: it was not counted."""


@dataclass(frozen=True)
class _MicroOutput:
    rows: list[int]
    logprobs: Tensor
    loss: Tensor
    metrics: dict[str, Tensor]
    routes: Tensor | None
    draws: Tensor | None


def _reduce(outputs: list[_MicroOutput], layout: Layout) -> tuple[float, dict[str, float]]:
    """Sum loss and metrics over micro-batches and data-parallel ranks, on every rank."""
    bad = [row for output in outputs if not torch.isfinite(output.loss) for row in output.rows]
    sums: dict[str, float] = {}
    for output in outputs:
        for name, value in {"": output.loss, **output.metrics}.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    gathered = all_gathered((sums, bad) if layout.is_reporting_rank else ({}, []))
    bad_rows = sorted(row for _, rows in gathered for row in rows)
    if bad_rows:
        raise NonFiniteLossError(
            f"loss: found a value that is not finite in the micro-batches of rows {bad_rows}, expected finite losses. "
            "The weights were not changed. Look at the log-probabilities and advantages of these rows.",
            bad_rows,
        )
    names = dict.fromkeys(name for part, _ in gathered for name in part)
    total = {name: sum(part.get(name, 0.0) for part, _ in gathered) for name in names}
    return total.pop("", 0.0), total
