"""Holds the models of one rank by role: the policy, and for some algorithms a reference and a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from fp8rl.models.architecture import Role
from fp8rl.numerics.config import NumericsConfig
from fp8rl.trainer.checkpoint import checkpoint
from fp8rl.trainer.config import TrainerSpec
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.distributed.offload import HostCopy, OffloadReport
from fp8rl.trainer.inventory import of_model
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.scorer import Scorer
from fp8rl.trainer.step.batch import Scored, TokenBatch
from fp8rl.trainer.step.head import Head, HeadOutput
from fp8rl.trainer.step.microbatches import MicroBatch
from fp8rl.trainer.trainer import Trainer


class Roles:
    """The models of one rank. All have the same model directory, layout and numerics.

    Attributes:
        models: the models by role. `policy` is always there.
    """

    def __init__(self, spec: TrainerSpec, layout: Layout) -> None:
        """Build the policy, and the reference and critic that the spec asks for. Raises UserError as `Trainer` does."""
        self.policy = Trainer(spec, layout)
        self.models: dict[Role, Trainer | Reference | WithoutAdapter] = {"policy": self.policy}
        spec = replace(spec, shared_base=False)
        if spec.reference:
            apart = spec.adapter is None
            self.models["reference"] = Reference(spec, layout) if apart else WithoutAdapter(self.policy)
        if spec.critic is not None:
            steps = spec.total_steps if spec.critic_steps is None else spec.critic_steps
            self.models["critic"] = Critic(replace(spec, config=spec.critic, total_steps=steps), layout)

    def offload(self) -> OffloadReport:
        """Free memory on the device, on which engines then sample."""
        reports = [model.offload() for model in self._held()]
        return OffloadReport(sum(report.moved for report in reports), sum(report.stays for report in reports))

    def onload(self) -> None:
        """Bring back what was offloaded. The gradients come back as zeros."""
        for model in self._held():
            model.onload()

    def stage(self, path: Path, extra: dict[str, Any], texts: Mapping[str, str]) -> checkpoint.Staged:
        """Copy the contents of a checkpoint of the trained models. See :func:`trainer.checkpoint.checkpoint.stage`."""
        return checkpoint.stage(path, self._parts(), self.policy.weight_version, extra, texts)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore the trained models from a checkpoint, and return its `extra`. A reference does not change."""
        self.policy.weight_version, extra = checkpoint.load(path, self._parts())
        for model in self._held():
            model.weights_changed()
        return extra

    def set_numerics(self, numerics: NumericsConfig) -> None:
        """Switch all models to other numerics. See :meth:`Scorer.set_numerics`."""
        for model in self._held():
            model.set_numerics(numerics)

    def _held(self) -> list[Trainer | Reference]:
        """Return the models that have weights of their own."""
        return [model for model in self.models.values() if not isinstance(model, WithoutAdapter)]

    def _parts(self) -> checkpoint.Parts:
        trained = {role: model.trained for role, model in self.models.items() if isinstance(model, Trainer)}
        return {"" if role == "policy" else role: part for role, part in trained.items()}


class Reference(Scorer):
    """A reference that keeps a copy of the model's weights. Between the trainer's turns it may be in host memory."""

    def __init__(self, spec: TrainerSpec, layout: Layout) -> None:
        super().__init__(spec, layout)
        self._host_copy = HostCopy()

    def score_routed(self, batch: TokenBatch) -> tuple[list[int], Scored]:
        self._host_copy.check_onloaded("a reference's weights")
        return super().score_routed(batch)

    def offload(self) -> OffloadReport:
        """Move the weights to host memory, and drop their quantized forms, while engines need the device."""
        freed = sum(holding.bytes for holding in of_model(self.model, self.cache))
        kept = (te_runtime.stored(p) if te_runtime.is_quantized(p) else [p] for p in self.model.parameters())
        self.weights_changed()
        self._host_copy.offload(chain.from_iterable(kept), [])
        return OffloadReport(freed, 0)

    def onload(self) -> None:
        """Bring back what was offloaded."""
        self._host_copy.onload()


class WithoutAdapter:
    """A reference that needs no memory. It scores batches with the policy's frozen weights, without adapters."""

    def __init__(self, policy: Trainer) -> None:
        self._policy = policy

    def score_routed(self, batch: TokenBatch) -> tuple[list[int], Scored]:
        """Score the rows of this rank, as :meth:`trainer.scorer.Scorer.score_routed` does."""
        with self._policy.precision.without_adapters(self._policy.definition.adapter):
            return self._policy.score_routed(batch)


# One rank of a critic: a model that says what reward is still to come, in place of what token comes next.


class Critic(Trainer):
    """Trains a model with a value head on this rank. It returns values in place of a `Trainer`'s log-probabilities. The
    value at t is the expected return from t on, before the token at t is chosen.
    """

    beside_adapters = ("output_layer.",)

    def _read_head(self, hidden: Tensor, head: Head, micro: MicroBatch) -> HeadOutput:
        """Return the value before each token except the first. The entropy is 0, and no token is drawn."""
        values = micro.from_model(head(hidden).transpose(0, 1).contiguous()[..., 0])[:, :-1]
        return HeadOutput(values, torch.zeros_like(values))

    def _finish(self, model: GPTModel) -> None:
        """Replace the output projection, which the embedding may share, by a value head."""
        model.share_embeddings_and_output_weights = False
        if model.post_process:
            model.output_layer = ValueHead(model.config, self.layout)


class ValueHead(nn.Module):
    """Replaces the output projection by an FP32 product with one vector, which starts at zero. Every tensor-parallel
    rank has the whole vector, and multiplies the whole sequence.

    The vector has the dtype of the other weights, and an FP32 master. megatron-core 0.16.1 could not write a checkpoint
    if the optimizer had weights of two dtypes.
    """

    def __init__(self, config: TransformerConfig, layout: Layout) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """[S, B, H] (S may be this rank's part) -> [S, B, 1] of all tokens."""
        if self.config.sequence_parallel:
            # Every rank goes on with the whole, so that each has the whole gradient and takes its own part of it.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.layout.tp_group
            )
        # A sum for each token by itself, so that a value does not depend on its batch.
        return (hidden.float() * self.weight[0].float()).sum(-1, keepdim=True), None
