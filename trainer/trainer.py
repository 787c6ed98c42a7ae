"""One rank of the trainer: a model, its optimizer and the state that a checkpoint holds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import read_model
from numerics.config import NumericsConfig
from numerics.errors import user_error
from numerics.probe import row_variant_ops
from numerics.quantize import QuantizedTensor
from numerics.weight_cache import WeightCache
from trainer import checkpoint, device, te_runtime, te_weights
from trainer.batch import TokenBatch
from trainer.config import TrainerConfig
from trainer.errors import NonFiniteLossError
from trainer.hf_weights import HFWeights
from trainer.lowering import lower
from trainer.model import build_model
from trainer.model_checks import check_layout
from trainer.modules.precision import Precision
from trainer.objective import Objective
from trainer.optimizer import Optimizer
from trainer.parallel import Layout
from trainer.result import PassResult, RankPassResult, Scored
from trainer.step import RankPass, run_pass


class Trainer:
    """Trains one model on this rank. Every public method needs all ranks, with equal arguments.

    Attributes:
        definition: what is known of the model before it is built. model: Megatron's, this rank's part of it.
        weight_version: optimizer steps taken.
        cache: the quantized weights that the forward uses, under its own count of weight changes.
    """

    def __init__(
        self,
        model_path: Path,
        config: TrainerConfig,
        numerics: NumericsConfig,
        layout: Layout,
        *,
        seed: int,
        total_steps: int,
        max_sequence_length: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Build the model and load the weights of the Hugging Face directory `model_path`.

        Raises:
            UserError: the directory, the layout or the sizes do not fit together.
        """
        torch.manual_seed(seed)
        self.config, self.numerics, self.layout = config, numerics, layout
        self.definition = read_model(model_path)
        sizes = self.definition.sizes
        check_layout(sizes, config, numerics.trainer_spec)
        _check_sequence_length(max_sequence_length, sizes.max_positions)
        _check_k_splits(config, numerics)
        self.max_sequence_length = max_sequence_length
        self.cache = WeightCache()
        self.weight_version = 0
        self.lowering = lower(numerics, device.has_transformer_engine())
        self._precision = Precision(numerics, self.cache, sizes.layers)
        self.model = build_model(self.definition, config, self._precision, self.lowering, max_sequence_length, dtype)
        self.weights = HFWeights(model_path, self.definition.tensors, self.model.config, numerics.spec.weight, dtype)
        self.weights.load(self.model)
        self.optimizer = Optimizer(self.model, config, self.lowering, total_steps)
        self._ready_norm: float | None = None

    def forward_backward(self, batch: TokenBatch, objective: Objective) -> RankPassResult:
        """The gradients of the whole batch. `update` applies them; another pass forgets them.

        Raises:
            NonFiniteLossError: on all ranks; there is nothing to apply then.
        """
        start = time.perf_counter()
        self._check_width(batch)
        self._ready_norm = None
        self.optimizer.zero_grad()
        done = self._pass(batch, objective)
        norm = self.optimizer.grad_norm()
        if not math.isfinite(norm):
            raise NonFiniteLossError(
                f"gradient norm: found a value that is not finite over rows 0 to {batch.rows - 1} although every loss "
                "is finite, expected a finite norm. The weights were not changed.",
                range(batch.rows),
            )
        self._ready_norm = norm
        result = PassResult(
            logprobs=done.logprobs,
            metrics=done.metrics,
            loss=done.loss,
            grad_norm=norm,
            seconds=time.perf_counter() - start,
            routes=done.routes,
            draws=done.draws,
        )
        return RankPassResult(done.rows, result)

    def update(self) -> float:
        """One optimizer step with the gradients of the last `forward_backward`; the learning rate used.

        Raises:
            RuntimeError: there are none, or they were applied already.
        """
        if self._ready_norm is None:
            raise RuntimeError("update: found no gradients, expected those of a forward_backward that succeeded")
        norm, self._ready_norm = self._ready_norm, None
        lr = self.optimizer.step(norm)
        self.weight_version += 1
        self.weights_changed()
        return lr

    def train_step(self, batch: TokenBatch, objective: Objective) -> RankPassResult:
        """`forward_backward` and `update` in one."""
        done = self.forward_backward(batch, objective)
        self.update()
        return done

    def score(self, batch: TokenBatch) -> tuple[list[int], Tensor]:
        """This rank's rows and their log-probabilities fp32 [len(rows), S]."""
        rows, scored = self.score_routed(batch)
        return rows, scored.logprobs

    def score_routed(self, batch: TokenBatch) -> tuple[list[int], Scored]:
        """Like `score`, with the router's own choice for a batch with routes, and draws for one with seeds."""
        self._check_width(batch)
        with torch.no_grad():
            done = self._pass(batch, None)
        return done.rows, Scored(done.logprobs, done.routes, done.draws)

    def export_weights(self) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Yield (HF name, tensor) for this rank's share of the checkpoint. See :meth:`HFWeights.share`."""
        return self.weights.share(self.model)

    def export_hf(self, path: Path) -> None:
        """Write a Hugging Face directory with the current weights."""
        self.weights.write(self.model, path)

    def save(self, path: Path, extra: dict[str, Any], texts: Mapping[str, str] | None = None) -> None:
        """Write a checkpoint, and wait for it."""
        checkpoint.save(path, self.model, self.optimizer, self.weight_version, extra, texts or {})

    def stage(self, path: Path, extra: dict[str, Any], texts: Mapping[str, str]) -> checkpoint.Staged:
        """Copy what a checkpoint holds, to be written while training goes on; see :func:`trainer.checkpoint.stage`."""
        return checkpoint.stage(path, self.model, self.optimizer, self.weight_version, extra, texts)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint and return its `extra`."""
        self.weight_version, extra = checkpoint.load(path, self.model, self.optimizer)
        self.weights_changed()
        return extra

    def weights_changed(self) -> None:
        """Retire all quantized weights. Whoever writes parameters calls it."""
        self.cache.advance(self.cache.version + 1)

    def set_numerics(self, numerics: NumericsConfig) -> None:
        """Compute in another precision or spec from now on, with the same weights.

        Raises:
            UserError: another mode, or the model's sizes do not fit the spec; nothing has changed then.
        """
        if numerics.mode != self.numerics.mode:
            raise user_error(
                "numerics.mode",
                found=numerics.mode,
                expected=f"{self.numerics.mode}, which the model was built for",
                remedy="Keep the mode; only the spec and the precision of a live trainer can change.",
            )
        check_layout(self.definition.sizes, self.config, numerics.trainer_spec)
        _check_k_splits(self.config, numerics)
        te_runtime.switch(self.lowering, lower(numerics, self.lowering.transformer_engine), self.model.config)
        self.numerics = self._precision.numerics = numerics
        self.weights_changed()

    def quantized_parameters(self) -> list[str]:
        """The parameters that the last forward multiplied with in FP8, by Megatron's name."""
        if self.lowering.transformer_engine:
            in_fp8 = self.model.config.fp8 is not None
            return [name for name, p in self.model.named_parameters() if in_fp8 and te_weights.is_quantized(p)]
        used = {id(weight) for weight in self.cache.weights()}
        return [name for name, p in self.model.named_parameters() if id(p) in used]

    def _pass(self, batch: TokenBatch, objective: Objective | None) -> RankPass:
        budget, multiple = self.config.micro_batch_tokens, self.layout.tp_size * self.lowering.row_multiple
        return run_pass(self.optimizer.model, batch, self.layout, budget, multiple, objective)

    def _check_width(self, batch: TokenBatch) -> None:
        if batch.width > self.max_sequence_length:
            raise ValueError(
                f"batch: found rows of {batch.width} tokens, expected at most max_sequence_length="
                f"{self.max_sequence_length}; start the trainer with a larger one"
            )


def check_row_invariance() -> None:
    """Raise `UserError` if a token's result depends on its batch on this machine, where no d could be 0."""
    variant = row_variant_ops(device.current())
    if variant:
        raise user_error(
            "numerics.mode",
            found=f"exact on a machine where these depend on the batch, or on how they are fused: {', '.join(variant)}",
            expected="row-invariant ops",
            remedy="Run one thread per process (OMP_NUM_THREADS=1), or on a CPU with AVX512-BF16.",
        )


def _check_sequence_length(wanted: int, limit: int) -> None:
    if wanted > limit:
        raise user_error(
            "max_sequence_length",
            found=wanted,
            expected=f"at most the model's max_position_embeddings={limit}",
            remedy="Lower rollout.context_length, or use a model with more positions.",
        )


def _check_k_splits(config: TrainerConfig, numerics: NumericsConfig) -> None:
    if numerics.mode == "exact" and config.tp > 1 and numerics.k_splits != config.tp:
        raise user_error(
            "numerics.k_splits",
            found=numerics.k_splits,
            expected=f"trainer.tp={config.tp}",
            remedy="Set both to the same number, so that the engine adds partial sums in the trainer's order.",
        )
