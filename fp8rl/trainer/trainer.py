"""Trains a model on one rank. Holds the model, its optimizer and the other state of a checkpoint."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8rl.models.checkpoint.peft import START, read_adapter
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.delta import LastSent
from fp8rl.numerics.kv import BF16_CACHE, KVFormat
from fp8rl.numerics.probe import choose_deepgemm, choose_tiles, row_variant_ops
from fp8rl.numerics.spec import TensorSpec
from fp8rl.trainer import device
from fp8rl.trainer.adapters import attach, base_digest, keep_graph, update_survival
from fp8rl.trainer.checkpoint import checkpoint
from fp8rl.trainer.config import TrainerSpec, travels_in_fp8
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.distributed.offload import OffloadReport
from fp8rl.trainer.distributed.optimizer import Optimizer
from fp8rl.trainer.inventory import inventory, optimizer_parts
from fp8rl.trainer.megatron.model_checks import check_training
from fp8rl.trainer.modules.weights import matrices
from fp8rl.trainer.scorer import RankPass, Scorer
from fp8rl.trainer.step.batch import NonFiniteLossError, Objective, TokenBatch
from fp8rl.trainer.step.routing import move_biases


class Trainer(Scorer):
    """Trains one model on this rank. Every public method needs all ranks, with equal arguments.

    Attributes:
        weight_version: number of optimizer steps so far.
        last_sent: the tensors that this rank last sent to engines, kept if a sync sends only changes.
    """

    beside_adapters: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of parameters that are trained themselves in a run that trains adapters."""

    def __init__(self, spec: TrainerSpec, layout: Layout) -> None:
        """Build the model, load its weights, and make the optimizer. Raises UserError: the directory, the layout, the
        sizes or the adapter do not fit together."""
        torch.manual_seed(spec.seed)
        super().__init__(spec, layout)
        config, path = spec.config, spec.model_path
        if (adapter := spec.adapter) is not None:
            start = read_adapter(Path(adapter.start), path, self.definition, START) if adapter.start else None
            stays = self.beside_adapters
            attach(self.model, self.weights, self.cache, adapter, spec.seed, lambda n: n.startswith(stays), start)
            if config.recompute != "none":
                keep_graph(self.model)
        check_training(self.definition.shape, config, self.numerics.trainer_spec)
        self.weight_version = 0
        self.last_sent = LastSent()
        rows = self.weights.rows(self.model)
        self._rows = {
            parameter: [row for matrix, _ in matrices(name, parameter) for row in rows[matrix]]
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        """The rows of the tensor table that each trained parameter has, whole or in part."""
        experts = [p for p, rows in self._rows.items() if rows[0].expert is not None]
        self.optimizer = Optimizer(self.model, config, self.lowering, spec.total_steps, experts, self._gathered_in_fp8)
        self._runs = self.optimizer.model
        self._ready_norm: float | None = None
        self._loads: Tensor | None = None

    def forward_backward(self, batch: TokenBatch, objective: Objective) -> RankPass:
        """Compute the gradients of the whole batch. `update` applies them. Another pass discards them. Raises
        NonFiniteLossError on all ranks: a loss or the gradient norm is not finite, so `update` has no gradients."""
        start = time.perf_counter()
        self._check_width(batch)
        self._ready_norm = None
        self.optimizer.zero_grad()
        done = self._pass(batch, objective)
        self._loads = done.loads
        norm = self.optimizer.grad_norm()
        if not math.isfinite(norm):
            raise NonFiniteLossError(
                f"gradient norm: found a value that is not finite for rows 0 to {batch.rows - 1}, with finite losses, "
                "expected a finite norm. The weights were not changed.",
                range(batch.rows),
            )
        self._ready_norm = norm
        return RankPass(done.rows, replace(done.result, grad_norm=norm, seconds=time.perf_counter() - start))

    def update(self) -> float:
        """Do one optimizer step with the gradients of the last `forward_backward`. Return the learning rate. Raises
        RuntimeError: there are no gradients, or they were applied already."""
        if self._ready_norm is None:
            raise RuntimeError("update: found no gradients, expected a successful forward_backward before the update")
        norm, self._ready_norm = self._ready_norm, None
        lr = self.optimizer.step(norm)
        if self._loads is not None:
            move_biases(self.model, self._loads, self.config.router_bias_rate)
        self.weight_version += 1
        self.weights_changed()
        return lr

    def train_step(self, batch: TokenBatch, objective: Objective) -> RankPass:
        """Call `forward_backward`, then `update`. For tests and benchmarks: the loop runs its gates between the two."""
        done = self.forward_backward(batch, objective)
        self.update()
        return done

    def offload(self) -> OffloadReport:
        """Move masters and moments to host memory, and drop the gradients. `update` then raises RuntimeError until the
        next `forward_backward`.

        The model can still score, and its weights can be read, sent and saved. If the optimizer is on the host already
        (`trainer.optimizer.offload`), only the gradients' bytes are freed.
        """
        self._ready_norm = None
        optimizer, here = self.optimizer, device.current().type
        total = sum(holding.bytes for holding in inventory(optimizer, self.cache))
        state = (tensor for _, kind, tensor, _ in optimizer_parts(optimizer) if kind in ("masters", "moments"))
        moved = optimizer.host_copy.offload(
            [tensor for tensor in state if tensor.device.type == here], [each.grad_data for each in optimizer.buffers]
        )
        return OffloadReport(moved, total - moved)

    def onload(self) -> None:
        """Bring back what was offloaded. The gradients come back as zeros."""
        self.optimizer.host_copy.onload()

    def export_hf(self, path: Path) -> None:
        """Write a Hugging Face directory with the current weights."""
        self.weights.write(self.model, path)

    def export_adapter(self, path: Path, base: Path | None = None) -> None:
        """Write a directory in PEFT's format with the current adapters. base: the model directory that it names as its
        base. None: the model directory of the run."""
        self.weights.write_adapters(self.model, path, base)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint and return its `extra`."""
        self.weight_version, extra = checkpoint.load(path, {"": self.trained})
        self.weights_changed()
        return extra

    def update_survival(self) -> float | None:
        """Measure how much of merged adapters survives quantization. None without merged adapters or quantization."""
        adapter, spec = self.definition.adapter, self.numerics.trainer_spec
        if adapter is None or adapter.mode != "merged" or not spec.quantized:
            return None
        rows = self.weights.rows(self.model)

        def spec_of(name: str) -> TensorSpec | None:
            first = rows.get(name) or rows[f"{name}0"]
            return spec.weight if self.definition.quantizes(first[0], spec) else None

        return update_survival(self.model, spec_of, self.layout)

    def _gathered_in_fp8(self) -> dict[nn.Parameter, TensorSpec]:
        """Return the parameters that ranks send as FP8 codes after an update, each with its spec."""
        spec = self.numerics.trainer_spec
        if self.config.weight_gather == "bf16" or self.lowering.recipe or not travels_in_fp8(spec.weight):
            return {}
        quantizes = self.definition.quantizes
        chosen = (p for p, rows in self._rows.items() if rows and all(quantizes(row, spec) for row in rows))
        return dict.fromkeys(chosen, spec.weight)

    @property
    def trained(self) -> checkpoint.Trained:
        """The parts of the model that training changes."""
        return checkpoint.Trained(self.model, self.optimizer, self.layout, self._adapter)

    @functools.cached_property
    def _adapter(self) -> dict[str, Any] | None:
        """The description of the adapters for a checkpoint. All ranks must read it."""
        if (adapter := self.definition.adapter) is None:
            return None
        digest = base_digest(self.model, self.weights) if self.placed is None else self.placed.unquantized
        return {**adapter.model_dump(mode="json"), checkpoint.BASE: digest}


def check_row_invariance(deepgemm: bool | None = False, kv: KVFormat = BF16_CACHE) -> None:
    """Raise `UserError` if a token's result depends on its batch on this machine, because then d would not be 0.

    deepgemm: True: also raise it if DeepGEMM cannot run. None: use DeepGEMM if it can. kv: format of keys and values.
    """
    choose_tiles(device.current())
    if (reason := choose_deepgemm(device.current(), deepgemm)) is not None:
        expected = "a Hopper GPU on which DeepGEMM gives the bits of our kernels"
        remedy = "Set numerics.deepgemm=false. Products then run on our kernels, with the same results."
        raise user_error("numerics.deepgemm", f"true, and {reason}", expected, remedy)
    variant = row_variant_ops(device.current(), kv)
    if variant:
        found = f"exact on a machine where these ops depend on the batch, or on their fusion: {', '.join(variant)}"
        remedy = "Run one thread per process (OMP_NUM_THREADS=1), or on a CPU with AVX512-BF16."
        raise user_error("numerics.mode", found, "row-invariant ops", remedy)
