"""Trainers that are spoiled on purpose: state or ops in a format that is too narrow for them.

Values are rounded to the format and stay in their dtype; gradients pass a rounding straight through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fp8rl.numerics.backend import dispatch
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import TensorSpec

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

Narrow = Literal["bf16", "fp8 1x128", "fp8 tensor", "fp8 unscaled"]
GROUPS = TensorSpec(scale="fp32")
TENSOR = TensorSpec(scale="fp32", granularity="tensor")
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def narrowed(x: Tensor, to: Narrow) -> Tensor:
    """x with every value rounded to E4M3 or BF16, in x's dtype. Scales are FP32; `unscaled` is the plain cast."""
    return stored(x, to)[0]


def stored(x: Tensor, to: Narrow) -> tuple[Tensor, Tensor]:
    """`narrowed` x, and the codes that would be stored beside the scales, as int64."""
    if to == "bf16":
        codes = x.bfloat16()
        return codes.to(x.dtype), codes.view(torch.int16).long()
    if to == "fp8 unscaled":
        codes = x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return codes.to(x.dtype), codes.view(torch.uint8).long()
    matrix = x.reshape(1, -1) if x.dim() < 2 else x.reshape(-1, x.shape[-1])
    quantized = quantize(matrix, GROUPS if to == "fp8 1x128" else TENSOR)
    values = quantized.dequantize().to(x.dtype).reshape(x.shape)
    return values, quantized.data.view(torch.uint8).long().reshape(x.shape)


@dataclass
class NarrowState:
    """Rounds the optimizer's state after every update, as if it were stored so."""

    masters: Narrow | None = None
    first: Narrow | None = None
    second: Narrow | None = None
    """Formats of the weights' masters and of Adam's m and v; None: FP32."""
    noted: dict[str, list[float]] = field(default_factory=dict)
    """What was lost, by name, added up over the steps: `lost_updates`, the share of updates other than 0 that left a
    weight's code as it was, and `lost_second`, the share of v above 0 that became 0."""
    _before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, trainer: Trainer) -> None:
        moved = stayed = positive = vanished = 0
        for megatron in trainer.optimizer.inner.chained_optimizers:
            if megatron.is_stub_optimizer:
                continue
            for group in megatron.optimizer.param_groups:
                for master in group["params"]:
                    state = megatron.optimizer.state[master]
                    if self.first:
                        state["exp_avg"].copy_(narrowed(state["exp_avg"], self.first))
                    if self.second:
                        kept = narrowed(state["exp_avg_sq"], self.second)
                        positive += int((state["exp_avg_sq"] > 0).sum())
                        vanished += int(((state["exp_avg_sq"] > 0) & (kept == 0)).sum())
                        state["exp_avg_sq"].copy_(kept)
                    if self.masters:
                        values, codes = stored(master, self.masters)
                        if id(master) in self._before:
                            before, codes_before = self._before[id(master)]
                            moved += int((master != before).sum())
                            stayed += int(((master != before) & (codes == codes_before)).sum())
                        master.copy_(values)
                        self._before[id(master)] = values, codes
            megatron._copy_main_params_to_model_params()
        trainer.weights_changed()
        if moved:
            self.noted.setdefault("lost_updates", []).append(stayed / moved)
        if positive:
            self.noted.setdefault("lost_second", []).append(vanished / positive)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to: Narrow) -> Tensor:
        return narrowed(x, to)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def rounded(x: Tensor, to: Narrow) -> Tensor:
    """`narrowed`, with its gradient passed straight through."""
    return _Rounded.apply(x, to)


@contextmanager
def with_ops(**replaced: Callable[..., Any]) -> Iterator[None]:
    """Ops of this process by other functions, which may call the definitions that they replace."""
    previous = dispatch.installed()
    dispatch.install({**dispatch.OPS, **(previous or {}), **replaced})
    try:
        yield
    finally:
        dispatch.install(previous)


def _attention(scores_to: Narrow | None, probs_to: Narrow | None, inputs_to: Narrow | None) -> Callable[..., Tensor]:
    """Softmax attention as autograd has it, with roundings; `ops.attention`'s signature."""

    def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
        dtype, repeats = q.dtype, q.shape[2] // k.shape[2]
        q, k, v = (rounded(x, inputs_to) if inputs_to else x for x in (q, k, v))
        q, k, v = (
            x.float().transpose(1, 2) for x in (q, k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2))
        )
        scores = q @ k.transpose(2, 3) * scale
        scores = rounded(scores, scores_to) if scores_to else scores
        hidden = torch.arange(k.shape[2], device=q.device) > positions[:, None, :, None]
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        probs = rounded(probs, probs_to) if probs_to else probs
        return (probs @ v).transpose(1, 2).to(dtype)

    return attention


def wide_attention(trainer: Trainer) -> Any:
    """The attention of the arms below without their roundings: what they are compared with."""
    return with_ops(attention=_attention(None, None, None))


def fp8_softmax(trainer: Trainer) -> Any:
    """Probabilities of the attention stored as plain E4M3 numbers."""
    return with_ops(attention=_attention(None, "fp8 unscaled", None))


def fp8_scores(trainer: Trainer) -> Any:
    """Scores of the attention stored as plain E4M3 numbers."""
    return with_ops(attention=_attention("fp8 unscaled", None, None))


def fp8_attention(trainer: Trainer) -> Any:
    """Queries, keys, values and probabilities in E4M3 with scales, as FP8 attention kernels take them."""
    return with_ops(attention=_attention(None, "fp8 1x128", "fp8 1x128"))


def fp8_norm(trainer: Trainer) -> Any:
    """The squares within RMSNorm as plain E4M3 numbers."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(rounded(wide.square(), "fp8 unscaled").mean(-1, keepdim=True) + eps)
        return (wide * inverse * weight.float()).to(x.dtype)

    return with_ops(rms_norm=rms_norm)


@contextmanager
def fp8_router(trainer: Trainer) -> Iterator[None]:
    """The router's product in FP8."""
    with ExitStack() as undo:
        for name, module in trainer.model.named_modules():
            if name.endswith(".router"):
                product = "gating" if hasattr(module, "gating") else "forward"
                undo.enter_context(_replaced(module, product, _fp8_product(module)))
        yield


@contextmanager
def fp8_head(trainer: Trainer) -> Iterator[None]:
    """The output projection in FP8."""
    layer = trainer.model.output_layer
    product = _fp8_product(layer)

    def forward(input: Tensor, weight: Tensor, *unused: Any, **context: Any) -> Tensor:
        return product(input)

    with _replaced(layer, "_forward_impl", forward):
        yield


@contextmanager
def fp8_embedding(trainer: Trainer) -> Iterator[None]:
    """Embeddings stored in E4M3 with a scale for each token's row."""
    with _outputs_rounded([trainer.model.embedding.word_embeddings]):
        yield


@contextmanager
def fp8_residual(trainer: Trainer) -> Iterator[None]:
    """The residual between layers stored in E4M3 with scales of 1x128."""
    with _outputs_rounded(list(trainer.model.decoder.layers)):
        yield


def _fp8_product(module: Any) -> Callable[[Tensor], Tensor]:
    def product(x: Tensor) -> Tensor:
        from fp8rl.numerics import ops

        return ops.linear(rounded(x, "fp8 1x128"), rounded(module.weight, "fp8 1x128"))

    return product


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    setattr(owner, name, value)  # on the instance, over its class's
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def _outputs_rounded(modules: list[nn.Module]) -> Iterator[None]:
    def narrow(module: nn.Module, given: Any, returned: Any) -> Any:
        if isinstance(returned, tuple):
            return (rounded(returned[0], "fp8 1x128"), *returned[1:])
        return rounded(returned, "fp8 1x128")

    hooks = [module.register_forward_hook(narrow) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
