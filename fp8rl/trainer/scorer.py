"""Scores batches with one rank of a model. It is the base class of a trainer, a critic and a frozen reference."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from fp8rl.models import read_model
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.shared_base import SharedBase
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.memory import NAN, give_back, placeholders
from fp8rl.numerics.weight_cache import WeightCache
from fp8rl.trainer import device
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.megatron.lowering import lower
from fp8rl.trainer.megatron.model import build_model
from fp8rl.trainer.megatron.model_checks import check_layout, check_rows
from fp8rl.trainer.modules.precision import Precision
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.head import Head, HeadOutput, read_logprobs
from fp8rl.trainer.step.microbatches import MicroBatch
from fp8rl.trainer.step.objective import Objective, RankPass, Scored
from fp8rl.trainer.step.passes import run_pass
from fp8rl.trainer.weights.hf_weights import HFWeights


class Scorer:
    """Scores batches with one model on this rank. Every public method needs all ranks, with equal arguments.

    Attributes:
        definition: the description of the model, from its config. model: this rank's part of Megatron's model.
        cache: the quantized weights that the forward pass uses. Its version changes with the weights.
        placed: the base that it shares with engines (`weight_sync.frozen.MappedBase`). None: it shares no weights.
    """

    placed: Any = None

    def __init__(
        self,
        model_path: Path,
        config: TrainerSection,
        numerics: NumericsConfig,
        layout: Layout,
        *,
        max_sequence_length: int,
        dtype: torch.dtype = torch.bfloat16,
        adapter: AdapterSection | None = None,
        shared_base: bool = False,
    ) -> None:
        """Build the model and load the weights of the Hugging Face directory `model_path`.

        shared_base: load no weights. `adopt` must then read them from a base. Until then they are NaN, without memory.

        Raises UserError: the directory, the layout or the sizes do not fit together.
        """
        self.config, self.numerics, self.layout = config, numerics, layout
        self.definition = read_model(model_path).adapted(adapter)
        sizes = self.definition.sizes
        check_layout(self.definition.shape, config, numerics.trainer_spec)
        check_rows(config, numerics.mode, device.has_transformer_engine())
        if max_sequence_length > sizes.max_positions:
            expected = f"at most {sizes.max_positions}, the model's {sizes.limit}"
            remedy = "Lower rollout.context_length, or use a model with more positions."
            raise user_error("max_sequence_length", max_sequence_length, expected, remedy)
        _check_k_splits(config, numerics)
        self.max_sequence_length = max_sequence_length
        self.cache = WeightCache()
        self.lowering = lower(numerics, device.has_transformer_engine())
        self.precision = Precision(numerics, self.cache, sizes.layers)
        with placeholders(NAN) if shared_base else nullcontext():
            self.model = build_model(self.definition, config, self.precision, self.lowering, max_sequence_length, dtype)
        spec = numerics.spec.weight
        self.weights = HFWeights(model_path, self.definition, spec, self.cache, layout, dtype)
        self._waits = shared_base
        if not shared_base:
            self.weights.load(self.model)
        self._finish(self.model)

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
        self.cache.advance(self.cache.version + 1)

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
        """Switch to another precision or spec, with the same weights. Raises UserError, and changes nothing, if the
        mode is another one or the model's sizes do not fit the spec."""
        if numerics.mode != self.numerics.mode:
            expected = f"{self.numerics.mode}, for which the model was built"
            remedy = "Keep the mode. Only the spec and the precision of a started trainer can change."
            raise user_error("numerics.mode", numerics.mode, expected, remedy)
        check_layout(self.definition.shape, self.config, numerics.trainer_spec)
        _check_k_splits(self.config, numerics)
        te_runtime.switch(self.lowering, lower(numerics, self.lowering.transformer_engine), self.model.config)
        self.numerics = self.precision.numerics = numerics
        self.weights_changed()

    def _finish(self, model: GPTModel) -> None:
        """Change the model after its weights are loaded. A subclass may override this."""

    @property
    def _runs(self) -> nn.Module:
        """The module that Megatron's schedule runs: the model or its data-parallel wrapper."""
        return self.model

    def _pass(self, batch: TokenBatch, objective: Objective | None) -> RankPass:
        codes, multiple = self.numerics.kv_format.quantized, self.lowering.row_multiple
        return run_pass(self._runs, batch, self.layout, self.config, objective, self._read_head, multiple, codes)

    def _read_head(self, hidden: Tensor, head: Head, micro: MicroBatch) -> HeadOutput:
        """Return the head's output for the final hidden states of a micro-batch."""
        return read_logprobs(hidden, head, micro, self.config.head_chunk_tokens)

    def _check_width(self, batch: TokenBatch) -> None:
        if batch.width > self.max_sequence_length:
            raise ValueError(
                f"batch: found rows of {batch.width} tokens, expected at most max_sequence_length="
                f"{self.max_sequence_length}. Start the trainer with a larger max_sequence_length"
            )


def _check_k_splits(config: TrainerSection, numerics: NumericsConfig) -> None:
    if numerics.mode == "exact" and config.tp > 1 and numerics.k_splits != config.tp:
        remedy = "Set both to the same number. The engine then adds partial sums in the trainer's order."
        raise user_error("numerics.k_splits", numerics.k_splits, f"trainer.tp={config.tp}", remedy)
