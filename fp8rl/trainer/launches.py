"""Launches what a trainer rank launches on a GPU: its micro-batches run on the meta device, where nothing is computed.

`numerics.kernels.precompile` notes which kernels these are. There are no other ranks, and the one pipeline stage has
all layers.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn

from fp8rl.models import Model
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.kernels.precompile import META
from fp8rl.numerics.sampling import EVERY_TOKEN, Truncation
from fp8rl.numerics.weight_cache import WeightCache
from fp8rl.trainer import device
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.context_parallel import CHUNKS
from fp8rl.trainer.step.batch import TokenBatch

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from fp8rl.trainer.modules.precision import Precision
    from fp8rl.trainer.step.head import Head
    from fp8rl.trainer.step.microbatches import MicroBatch

_SHORT = ((1, 17), (3, 48))
"""Rows and their tokens, in multiples of what the model takes, that may run in shorter tiles than a whole
micro-batch."""


def launch_step(
    path: Path,
    definition: Model,
    config: TrainerSection,
    numerics: NumericsConfig,
    longest: int,
    truncation: Truncation = EVERY_TOKEN,
    *,
    reference: bool = False,
    critic: TrainerSection | None = None,
) -> None:
    """Score and train micro-batches of one rank. The process is good for no other model afterwards.

    path: of the model's config. longest: tokens of a row. reference: whether batches are also scored without the
    policy's adapters. critic: see `trainer.roles.Roles`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fp8rl.trainer.distributed import parallel

    config = config.model_copy(update={"pp": 1})
    with mock.patch.object(device, "collectives", lambda here: "fake"):
        layout = parallel.initialize(config, 0, FakeStore())
    try:
        from fp8rl.trainer.modules import dispatch

        with (
            mock.patch.object(torch.cuda, "current_device", lambda: META),
            mock.patch.object(dispatch, "on_host", _evenly),
        ):
            launch = partial(_launch, path, definition, numerics, longest, truncation, layout)
            launch(config, bare=reference and definition.adapter is not None)
            if critic is not None:
                launch(critic.model_copy(update={"pp": 1}), values=True)
    finally:
        parallel.shutdown()


def _launch(
    path: Path,
    definition: Model,
    numerics: NumericsConfig,
    longest: int,
    truncation: Truncation,
    layout: Any,
    config: TrainerSection,
    bare: bool = False,
    values: bool = False,
) -> None:
    """bare: score without adapters, too. values: by a critic, in place of log-probabilities."""
    from fp8rl.trainer.adapters import attach, keep_graph
    from fp8rl.trainer.critic import give_value_head, is_of_value_head, read_values
    from fp8rl.trainer.distributed.optimizer import wrap
    from fp8rl.trainer.megatron.lowering import lower
    from fp8rl.trainer.megatron.model import build_model
    from fp8rl.trainer.modules.precision import Precision
    from fp8rl.trainer.modules.weights import matrices
    from fp8rl.trainer.step.head import head_of, hidden_states, read_logprobs
    from fp8rl.trainer.weights.hf_weights import HFWeights

    cache, lowering = WeightCache(), lower(numerics, False)
    precision = Precision(numerics, cache, definition.sizes.layers)
    model = build_model(definition, config, layout, precision, lowering, longest)
    if numerics.mode == "exact":
        _keep_one_of_each(model, precision)
    else:  # what layers launch there is Megatron's and TransformerEngine's
        model.decoder.layers = nn.ModuleList()
    weights = HFWeights(path, definition, model.config, numerics.spec.weight, cache, layout)
    if values:
        give_value_head(model, layout)
    if definition.adapter is not None:
        attach(model, weights, cache, definition.adapter, 0, is_of_value_head if values else lambda name: False)
        if config.recompute != "none":
            keep_graph(model)
    rows = weights.rows(model)
    first = {p: next(matrices(name, p))[0] for name, p in model.named_parameters() if p.requires_grad}
    experts = [p for p, name in first.items() if rows[name][0].expert is not None]
    wrapped = wrap(model, lowering, experts)
    read = read_values if values else partial(read_logprobs, chunk=config.head_chunk_tokens)
    for micro in _micro_batches(config, layout.tp_size * lowering.row_multiple, longest, truncation):
        for training in (False, True):
            for with_entropy in (False, True)[: 1 + (training and not values)]:
                with nullcontext() if training else torch.no_grad():
                    found = read(hidden_states(wrapped, micro), head_of(model), micro)
                if not training and not values:
                    _draw(head_of(model), micro)
                if training:
                    (found.values.sum() + found.entropy.sum() if with_entropy else found.values.sum()).backward()
        if bare:
            with torch.no_grad(), precision.without_adapters(definition.adapter):
                read(hidden_states(wrapped, micro), head_of(model), micro)


def _draw(head: Head, micro: MicroBatch) -> None:
    """Draw tokens again, as a batch with seeds has it: which of them, only the device would know."""
    count, vocabulary = micro.batch.rows, head.weight.shape[0]
    logits = torch.empty(count, vocabulary, dtype=head.weight.dtype, device=META)
    numbers = torch.empty(count, dtype=torch.int64, device=META)
    ops.draw(logits, torch.empty(count, device=META), numbers, numbers)


def _keep_one_of_each(model: GPTModel, precision: Precision) -> None:
    """Leave out layers that launch what another one does: of the same parameters, quantized alike."""
    kinds: dict[object, nn.Module] = {}
    for index, layer in enumerate(model.decoder.layers):
        held = tuple((name, p.shape, p.dtype) for name, p in layer.named_parameters())
        kinds.setdefault((held, precision.of_layer(index).spec), layer)
    model.decoder.layers = nn.ModuleList(kinds.values())


def _evenly(sizes: torch.Tensor, rows: int) -> list[list[int]]:
    """Stand in for the counts that ranks send each other, which nobody can read on the meta device."""
    ranks = sizes.shape[1]
    return [[rows // ranks + (rank < rows % ranks) for rank in range(ranks)]] * 2


def _micro_batches(config: TrainerSection, multiple: int, longest: int, truncation: Truncation) -> Iterator[Any]:
    from fp8rl.trainer.step.trees import form_of

    if config.cp > 1:
        multiple = config.cp * math.lcm(multiple, CHUNKS)
    width = max(longest // multiple, 1) * multiple
    whole = max(config.micro_batch_tokens // width, 1), width
    for rows, tokens in (*((rows, n * multiple) for rows, n in _SHORT), whole):
        lengths, mask = torch.full((rows,), tokens), torch.ones(rows, tokens, dtype=torch.bool)
        mask[:, 0] = False
        numbers = torch.arange(rows)[:, None].repeat(1, tokens)  # a tree of rows that share nothing is as large as they
        batch = TokenBatch(numbers, lengths, mask, 1.0, truncation=truncation)
        with mock.patch.object(device, "current", lambda: device.CPU):
            made = form_of(config).of(batch, list(range(rows)), multiple)
        yield _on_meta(made)


def _on_meta(value: Any) -> Any:
    """A dataclass, and those in it, with its tensors on the meta device, unchecked: nothing can be read there."""
    if isinstance(value, torch.Tensor):
        return value.to(META)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    moved = copy.copy(value)
    for each in dataclasses.fields(value):
        object.__setattr__(moved, each.name, _on_meta(getattr(value, each.name)))
    return moved
