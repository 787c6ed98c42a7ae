"""Defines the `trainer:` section of an experiment spec, and the settings with which the trainer's ranks start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.numerics.core.section import Section
from fp8rl.numerics.spec import TensorSpec

GradientWire = Literal["fp32", "bf16", "e4m3", "e5m2"]
WeightGather = Literal["bf16", "e4m3"]
Recompute = Literal["none", "attention", "experts", "layer"]
CHUNKS = 2
"""Number of chunks of a row that each context-parallel rank has."""
STACK_ELEMENTS = 16 << 20
"""Largest number of elements in a stack of several experts, as a sync sends them."""


class RateSection(Section):
    """The learning rate over a run's steps."""

    lr: float = Field(default=1e-4, gt=0.0, le=100.0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0.0)
    """Learning rate at the end of the decay. At most `lr`."""
    warmup_steps: int = Field(default=5, ge=0)
    """Optimizer steps of linear warm-up from zero. A shorter run ends before it reaches `lr`."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """The shape of the decay from `lr` to `min_lr`. `constant`: no decay."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the decay, at the end of the run. Null: all after the warm-up."""

    @model_validator(mode="after")
    def _decays_downward(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"found min_lr={self.min_lr}, expected at most lr={self.lr}. Lower min_lr")
        return self


class OptimizerSection(Section):
    """The place and the format of the FP32 masters and Adam's moments. Both keys have an effect only on a GPU."""

    moments: Literal["fp32", "bf16"] = "fp32"
    """Type of Adam's two moments on the GPU. `bf16`, with TransformerEngine's Adam, halves their memory."""
    offload: bool = False
    """Keep masters and moments in host memory, and run Adam there. The GPU then holds 12 bytes a parameter less, and
    the update is slower. Refused if TransformerEngine stores weights in FP8. No effect without a GPU."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if self.offload and self.moments != "fp32":
            raise ValueError(
                f"found moments={self.moments} with offload=true, expected fp32, because torch's Adam runs on the host "
                "and has only FP32 moments. Set only one of the two keys"
            )
        return self


class TrainerSection(RateSection):
    """Parallel layout, optimizer, learning-rate schedule and micro-batch size of the Megatron trainer."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks."""
    pp: int = Field(default=1, ge=1)
    """Pipeline-parallel ranks. pp must divide the number of layers."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel ranks, among the tp * dp * cp ranks of a stage. ep must divide this product."""
    dp: int = Field(default=1, ge=1)
    """Data-parallel replicas. The trainer has tp * pp * dp * cp ranks."""
    cp: int = Field(default=1, ge=1)
    """Context-parallel ranks. They split the tokens of each row, so that longer rows fit. No log-probability changes.
    Gradients of weights are summed over tokens in another order. Exact mode only, without `packing`."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=100.0)
    """Decoupled weight decay, as in AdamW."""
    adam_beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Adam's beta1, the decay of the running mean of gradients."""
    adam_beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Adam's beta2, the decay of the running mean of squared gradients."""
    adam_eps: float = Field(default=1e-8, gt=0.0, le=1.0)
    """Adam's epsilon, added to the root of the mean squared gradient."""
    clip_grad: float = Field(default=1.0, gt=0.0, le=1e9)
    """Largest global gradient norm. Larger gradients are scaled down to it."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Most tokens of one micro-batch, padding included. A longer row gets its own micro-batch."""
    packing: bool = False
    """Place the rows of a micro-batch end to end instead of padding each to the longest. No log-probability changes.
    Gradients of weights are summed over tokens in another order. Native mode needs TransformerEngine for packing."""
    prefix_sharing: bool = False
    """Compute a prefix that rows of a micro-batch share only once: the prompt of a group's answers, or the turns before
    a conversation branches. Rows are packed, also with `packing: false`. No log-probability changes. Gradients of a
    shared token are added over its rows before they are rounded. Exact mode only, without `cp`."""
    optimizer: OptimizerSection = OptimizerSection()
    """The memory of the optimizer on a GPU."""
    recompute: Recompute = "none"
    """Activations that the forward pass drops and the backward pass recomputes, with the same bits. `attention`: from
    queries, keys and values to the attention's output. `experts`: inside the routed experts and their router, and
    inside the MLP of a layer without experts. `layer`: everything inside a layer."""
    head_chunk_tokens: int = Field(default=4096, ge=1)
    """Most tokens whose logits exist at the same time. A larger micro-batch goes through the head in equal chunks. The
    backward pass computes their logits again. No log-probability changes. The gradient of the head's weight is summed
    over chunks in FP32."""

    router_bias_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    """Step size of the expert biases of a sigmoid router. Each optimizer step adds it to the bias of each expert that
    fewer of the batch's tokens chose than the layer's mean, and subtracts it if more tokens did. DeepSeek-V3 was
    trained with 0.001. With 0, which is usual in reinforcement learning, the model's biases do not change. Each sync
    sends the biases to the engines."""

    gradient_wire: GradientWire = "fp32"
    """The format in which data-parallel ranks send gradients. `e4m3` and `e5m2` have an FP32 scale per 128 numbers,
    and take 0.26 of the bytes of `fp32`. With every format, sums over micro-batches and over ranks are in FP32."""
    weight_gather: WeightGather = "bf16"
    """The format in which ranks send updated weights. `e4m3`: weights of FP8 products are sent as the codes to which
    the products quantize them anyway, so no log-probability changes. The model that the run writes at its end has the
    rounded weights. All other weights, such as norms, router and embeddings, are sent in BF16. If TransformerEngine
    stores weights in FP8 (native mode on a GPU), it always sends FP8."""

    hung_after_s: float = Field(default=120.0, ge=1.0)
    """A rank whose process is alive counts as lost after this many seconds without a heartbeat."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the trainer. Expert parallelism uses the tp * dp * cp ranks of a stage, and adds none."""
        return self.stage_size * self.pp

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.tp * self.copies

    @property
    def packs(self) -> bool:
        """True if the rows of a micro-batch are packed end to end, with or without shared prefixes."""
        return self.packing or self.prefix_sharing

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same dense weights: dp * cp."""
        return self.dp * self.cp


@dataclass(frozen=True)
class TrainerSpec:
    """The settings with which every rank of a trainer starts. All models have the same layout and numerics."""

    model_path: Path
    """The Hugging Face directory of the model."""
    config: TrainerSection
    numerics: NumericsConfig
    seed: int
    total_steps: int
    """Number of optimizer steps of the policy over the run."""
    max_sequence_length: int
    reference: bool = False
    """Whether the trainer also scores with the unchanged model of `model_path`. A policy with adapters has the weights
    of this model as its frozen weights. For any other policy the trainer keeps a copy."""
    critic: TrainerSection | None = None
    """The settings of the critic and its optimizer. None: there is no critic."""
    critic_steps: int | None = None
    """Number of optimizer steps of the critic. None: the same as the policy's."""
    adapter: AdapterSection | None = None
    """The adapters to train in place of the weights. None: the weights are trained."""
    shared_base: bool = False
    """Whether the policy reads its frozen weights from a base that it shares with engines (`weight_sync.frozen`)."""
    architecture: str | None = None
    """A user's file with the model's architecture. None: fp8rl has the architecture."""
    dtype: torch.dtype = torch.bfloat16
    """The dtype of weights and activations."""


@dataclass(frozen=True)
class ActorPlacement:
    """Where an actor runs. The default is this machine, without a GPU. The run's processes then use loopback only."""

    host: str = LOOPBACK
    """Address at which the run's other processes reach this one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Ray's options of the actor."""

    def actor_options(self, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return Ray's options of the actor, with more environment variables."""
        return {**self.options, "runtime_env": {"env_vars": {**(environment or {}), **self.environment}}}


def travels_in_fp8(spec: TensorSpec) -> bool:
    """Return True if weights of this spec may be sent quantized (`weight_gather`), because a second quantization of the
    rounded values does not change them."""
    return spec.format == "e4m3" and spec.granularity == "block" and spec.scale == "pow2" and spec.rounding == "nearest"
