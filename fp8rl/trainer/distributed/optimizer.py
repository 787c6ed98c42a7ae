"""Sets up Megatron's data-parallel wrapper, distributed optimizer and learning-rate schedule for a model."""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from fp8rl.numerics.core.process import all_gathered
from fp8rl.trainer import device
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import wires
from fp8rl.trainer.distributed.gathering import GatheredInPieces
from fp8rl.trainer.distributed.offload import HostCopy
from fp8rl.trainer.megatron.lowering import Lowering, lower_optimizer
from fp8rl.trainer.megatron.patches import CUDA_TYPES, applied, become
from fp8rl.trainer.modules.weights import tag_split


class Optimizer:
    """AdamW for one model, on FP32 masters that are sharded over the data-parallel ranks. Norms have no weight decay.

    Gradients are summed over micro-batches and data-parallel ranks in FP32. They are not averaged, because the
    objective has divided by its own denominators. `host_copy` offloads masters and moments while engines need the
    device.
    """

    def __init__(
        self,
        model: GPTModel,
        config: TrainerSection,
        lowering: Lowering,
        total_steps: int,
        experts: Iterable[torch.nn.Parameter],
        in_fp8: wires.InFp8 = dict,
    ) -> None:
        """experts: the experts' parameters. in_fp8: returns the parameters to gather in FP8. Called at each gather."""
        self.model = wrap(model, lowering, experts)
        wires.install(self.model, config.gradient_wire, in_fp8)
        self._config = config
        optimizer_config = OptimizerConfig(
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=True,
            **lowering.optimizer,
            **lower_optimizer(
                config.optimizer,
                bool(lowering.ddp.get("fp8_param_gather")),
                torch.cuda.is_available(),
                device.has_transformer_engine(),
            ),
        )
        with applied(CUDA_TYPES):
            self.inner: ChainedOptimizer = get_megatron_optimizer(
                optimizer_config,
                [self.model],
                config_overrides=get_standard_config_overrides(optimizer_config),
                use_gloo_process_groups=False,
            )
        self.host_copy = HostCopy()
        for optimizer in self.inner.chained_optimizers:
            if not optimizer.is_stub_optimizer:  # of a rank without such parameters
                _count_as_held(optimizer)
                _create_moments(become(optimizer, GatheredInPieces))
                optimizer.host_copy, optimizer.beside = self.host_copy, self.inner.chained_optimizers
        self.schedule = schedule(self.inner, config, total_steps)
        self._threads = step_threads(config.optimizer.offload)

    def zero_grad(self) -> None:
        """Set all gradients to zero. Call this before each forward and backward pass."""
        self.host_copy.check_onloaded()
        self.model.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Prepare the gradients for `step`, and return the norm of all of them."""
        self.inner.prepare_grads()
        return float(self.inner.get_grad_norm())

    @torch.no_grad()
    def step(self, norm: float) -> float:
        """Clip the gradients, apply them, and return the learning rate. norm: the finite result of `grad_norm`."""
        with applied(CUDA_TYPES):
            for optimizer in self.inner.chained_optimizers:
                if optimizer.get_parameters():
                    # An optimizer that makes the masters itself has the gradients beside the parameters' own.
                    beside = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                    clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self._config.clip_grad, norm, beside)
        # The schedule counts the step about to be taken, so that the first one does not have a rate of zero.
        self.schedule.step(1)
        with _threads(self._threads):
            for optimizer in self.inner.chained_optimizers:  # whose own method would gather all weights each time
                MixedPrecisionOptimizer.step_with_ready_grads(optimizer)
            self.model.start_param_sync()
        return self.lr

    @torch.no_grad()
    def write_weights(self) -> None:
        """Compute the model's weights from the FP32 masters, as a step does.

        A checkpoint stores FP8 weights in BF16. Quantization of these BF16 weights may give other codes and scales than
        quantization of the masters.
        """
        for optimizer in self.inner.chained_optimizers:
            optimizer._copy_main_params_to_model_params()
        self.model.start_param_sync(force_sync=True)

    @torch.no_grad()
    def begin_again(self) -> None:
        """Set the FP32 masters to the model's weights, and reset the moments and the step count to zero."""
        self.host_copy.check_onloaded()
        self.inner.reload_model_params()
        for optimizer in self.inner.chained_optimizers:
            if optimizer.is_stub_optimizer:
                continue
            for group in optimizer.optimizer.param_groups:
                group.pop("step", None)  # TransformerEngine counts here, torch beside the moments
            for state in optimizer.optimizer.state.values():
                for name, value in state.items():
                    if name == "step" or name.startswith("exp_avg"):
                        value.zero_()

    @property
    def buffers(self) -> list[Any]:
        """Megatron's buffers. Each has parameters and their gradients."""
        return [*self.model.buffers, *self.model.expert_parallel_buffers]

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return float(self.inner.param_groups[0]["lr"])


class DataParallel(DistributedDataParallel):  # type: ignore[misc]
    """Megatron's wrapper, whose backward hooks have only weak references to it. Python's garbage collector does not
    see the hooks, which are in autograd's nodes. So Megatron's own hooks would keep the wrapper alive."""

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        this, own, make = weakref.ref(self), weakref.ref(param), DistributedDataParallel._make_backward_post_hook

        def hook(*unused: object) -> None:
            make(this(), own())(*unused)

        return hook


def wrap(model: GPTModel, lowering: Lowering, experts: Iterable[torch.nn.Parameter]) -> DistributedDataParallel:
    """Wrap a model in Megatron's data-parallel module. Gradient buffers are FP32, and sharded for the optimizer."""
    for parameter in experts:
        # Experts always have an optimizer of their own, so that checkpoints move between expert-parallel sizes.
        parameter.allreduce = False  # type: ignore[attr-defined]
        # Megatron leaves untagged parameters of tensor-parallel ranks above 0 out of the gradient norm, but each rank's
        # optimizer holds another part of the experts.
        if not hasattr(parameter, "tensor_model_parallel"):
            tag_split(parameter, 0)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, **lowering.ddp)
    return DataParallel(model.config, config, model)


def schedule(optimizer: ChainedOptimizer, config: TrainerSection, total_steps: int) -> OptimizerParamScheduler:
    """Make the learning-rate schedule: a linear warm-up, then `config.decay` over the last `config.decay_steps` steps.

    The decay would reach `min_lr` one step after the run's last step, so that no step has a rate of zero. A run that is
    shorter than the warm-up ends during the warm-up.
    """
    warmup = config.warmup_steps
    end = max(total_steps, warmup) + 1
    style: str = config.decay
    if style != "constant" and config.decay_steps is not None:
        style = "WSD"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=end,
        lr_decay_style=style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=min(config.decay_steps or 1, end - warmup),
        lr_wsd_decay_style=config.decay if style == "WSD" else None,
    )


def step_threads(offload: bool) -> int:
    """Return the number of threads for this rank's optimizer step: its share of the node's cores if the optimizer of a
    GPU is offloaded, otherwise 1. CPU ops give a row the same bits in every batch only with one thread."""
    if not (offload and torch.cuda.is_available()):
        return 1
    ranks = all_gathered(platform.node()).count(platform.node())
    return max(1, len(os.sched_getaffinity(0)) // ranks)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _count_as_held(optimizer: DistributedOptimizer) -> None:
    """Correct Megatron's index of each parameter's master. Megatron puts the FP32 parameters of a group first
    (distrib_optimizer.py:441), but numbers them in the order of the model."""
    places = optimizer.model_param_group_index_map
    for number in {group for group, _ in places.values()}:
        members = sorted((place, parameter) for parameter, (group, place) in places.items() if group == number)
        for place, (_, parameter) in enumerate(sorted(members, key=lambda entry: entry[1].dtype != torch.float32)):
            places[parameter] = number, place


def _create_moments(megatron_optimizer: DistributedOptimizer) -> None:
    """Give Adam its state before the first step, so that a checkpoint of step 0 can be written and read."""
    optimizer = megatron_optimizer.optimizer
    hybrid = isinstance(optimizer, HybridDeviceOptimizer)  # it would take a step of random gradients
    if hybrid or isinstance(optimizer, torch.optim.AdamW):
        for part in optimizer.sub_optimizers if hybrid else [optimizer]:
            for parameter in (each for group in part.param_groups for each in group["params"]):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                part.state[parameter] = {"step": torch.tensor(0.0), **moments}
        if hybrid:
            optimizer._sync_sub_optimizers_state_to_hdo()
    elif (config := megatron_optimizer.config).use_precision_aware_optimizer:  # TransformerEngine's; Megatron's own way
        for group in optimizer.param_groups:  # to it (optimizer/__init__.py:399) lacks an argument
            for parameter in group["params"]:
                optimizer.initialize_state(parameter, config.store_param_remainders)
    else:
        megatron_optimizer.init_state_fn(optimizer, megatron_optimizer.config)
