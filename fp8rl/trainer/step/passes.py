"""Runs one forward and backward pass over this rank's rows of a batch, by Megatron's schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from fp8rl.numerics.core.process import all_gathered
from fp8rl.trainer.config import CHUNKS, TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.modules.precision import count, kv_saturated
from fp8rl.trainer.step.batch import OWN_LIKELY, UNKNOWN, TokenBatch
from fp8rl.trainer.step.head import ReadHead, gpt_of, head_of, hidden_states, read_logprobs
from fp8rl.trainer.step.microbatches import MicroBatch
from fp8rl.trainer.step.objective import NonFiniteLossError, Objective, PassResult, RankPass
from fp8rl.trainer.step.routing import Routing, routing_of
from fp8rl.trainer.step.trees import form_of, with_tree_ratio


def run_pass(
    model: nn.Module,
    batch: TokenBatch,
    layout: Layout,
    config: TrainerSection,
    objective: Objective | None,
    read_head: ReadHead = read_logprobs,
    row_multiple: int = 1,
    codes: bool = False,
) -> RankPass:
    """Score the batch. With an objective, also sum its gradients in the buffers of `model`.

    All ranks must call this with the same batch.

    Args:
        objective: None for scoring only. Otherwise `model` is in Megatron's data-parallel wrapper.
        read_head: computes the head's output from the final hidden states.
        row_multiple: on each tensor-parallel rank a row of the model's input is padded to a multiple of this number.
        codes: whether keys and values are in FP8. Numbers that saturate are then counted.

    Raises:
        NonFiniteLossError: the loss of some micro-batches is not finite. All ranks raise it, with the rows of these
            micro-batches.
        UserError, ValueError: this model cannot take the batch's routes (:func:`trainer.step.routing.routing_of`).
    """
    multiple, form = layout.tp_size * row_multiple, form_of(config)
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
            forward_step_func=partial(_forward, objective=objective, read_head=read_head, routing=routing, codes=codes),
            data_iterator=(form.of(batch, rows, multiple) for rows in groups),
            model=[model],
            num_microbatches=len(groups),
            seq_length=batch.width,
            micro_batch_size=1,
            forward_only=objective is None,
        )
    loss = 0.0
    metrics: dict[str, float] = {}
    if objective is not None:
        loss, metrics = _reduce(outputs, layout)
    rows = [row for output in outputs for row in output.rows]
    logprobs = _collect([output.logprobs for output in outputs], outputs, torch.zeros(len(rows), batch.width))
    routes = None
    if batch.routes is not None:
        unknown = torch.full((len(rows), *batch.routes.shape[1:]), UNKNOWN, dtype=torch.int16)
        routes = _collect([output.routes for output in outputs], outputs, unknown)
    draws = None
    if batch.seeds is not None and all(output.draws is not None for output in outputs):
        undrawn = torch.full((len(rows), batch.width), UNKNOWN)
        draws = _collect([output.draws for output in outputs], outputs, undrawn)
    if routing.loads is not None:
        dist.all_reduce(routing.loads, group=layout.dp_group)
    if objective is not None:
        metrics = with_tree_ratio(metrics, batch)
        if codes:
            metrics["train/kv_saturated"] = kv_saturated(model)
    return RankPass(rows, PassResult(logprobs, routes, draws, metrics=metrics, loss=loss), routing.loads)


@dataclass(frozen=True)
class _MicroOutput:
    rows: list[int]
    logprobs: Tensor
    loss: Tensor
    metrics: dict[str, Tensor]
    routes: Tensor | None
    draws: Tensor | None


def _forward(
    micro_batches: Iterator[MicroBatch],
    model: nn.Module,
    objective: Objective | None,
    read_head: ReadHead,
    routing: Routing,
    codes: bool,
) -> Any:
    micro = next(micro_batches)
    routing.begin(micro)
    if codes and objective is not None:
        count(model, micro.real_in_model())
    hidden = hidden_states(model, micro)
    if codes:
        count(model, None)
    routes = routing.own_choice(micro)

    def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, _MicroOutput]:
        """Return what Megatron expects: the loss, an unused number of tokens, and results to keep."""
        batch, found = micro.batch, read_head(hidden, head_of(gpt_of(model)), micro)
        real = torch.arange(1, batch.width, device=hidden.device) < batch.lengths[:, None]
        logprobs = F.pad(torch.where(real, found.values, 0.0), (1, 0))
        metrics: dict[str, Tensor] = {}
        if objective is None or not micro.rows:
            loss = logprobs.sum() * 0.0
        else:
            if found.likely is not None:
                batch = batch.with_fields(**{OWN_LIKELY: F.pad(found.likely, (0, 0, 1, 0))})
            share = objective(logprobs, F.pad(torch.where(real, found.entropy, 0.0), (1, 0)), batch)
            loss = share.loss
            metrics = {name: value.detach() for name, value in (share.metrics | micro.metrics()).items()}
        kept = _MicroOutput(micro.rows, logprobs.detach(), loss.detach().float(), metrics, routes, found.draws)
        return loss, torch.zeros([], dtype=torch.int, device=loss.device), kept

    return hidden, loss_of


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


def _collect(values: list[Any], outputs: list[_MicroOutput], whole: Tensor) -> Tensor:
    """Copy the micro-batches' tensors [b, s, ...], one after the other, into `whole` [B, S, ...] on the CPU."""
    at = 0
    for value, output in zip(values, outputs):
        count, width = len(output.rows), min(value.shape[1], whole.shape[1])
        whole[at : at + count, :width] = value[:count, :width].cpu()
        at += count
    return whole
