"""Computes log-probabilities of given tokens (`numerics.ops.token_logprobs`) in one pass, with no softmax in memory.

The vocabulary is read in blocks, in order, with the online softmax (Milakov and Gimelshein 2018): lane i of the sums
adds element i of each block, and the lanes are added in pairs at the end. This order is the same for every number of
rows, dtype and alignment of the logits. Logits are multiplied by 1 / temperature, one division for a row, where the
definition divides each logit. With a temperature of 1 the numbers are the same, otherwise they differ by a rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import cast, dense_rows, pairwise_sum

_BLOCK = 4096
# exp of it is 0, and it has finite multiples where -inf has not; NaN and zero weights stay what they are.
_FAR = tl.constexpr(-1e4)
_OPTIONS = {"BLOCK": _BLOCK, "num_warps": 8, "enable_fp_fusion": False}


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Compute `numerics.ops.token_logprobs` of BF16 or FP32 logits. A token outside the vocabulary has log-probability
    NaN."""
    # Batch, sequence and vocabulary with whatever strides; a copy only of more axes.
    matrices = logits[(None,) * max(0, 3 - logits.dim())].flatten(0, -3)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.device, torch.float32).expand(tokens.shape).flatten().contiguous()
    else:
        temperature = float(temperature)  # an int of 1 would be a kernel of its own
    logprobs, entropy = _TokenLogprobs.apply(matrices, tokens.flatten().contiguous(), temperature)
    return logprobs.view(tokens.shape), entropy.view(tokens.shape)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        logits = dense_rows(logits)
        logprobs, entropy, logsumexp = torch.empty(3, len(tokens), dtype=torch.float32, device=logits.device)
        each = isinstance(temperature, Tensor)
        _forward_kernel[(len(tokens),)](
            *(logits, tokens, temperature, logprobs, entropy, logsumexp),
            *(*logits.shape[1:], *logits.stride()[:2]),
            EACH=each,
            **_OPTIONS,
        )
        ctx.save_for_backward(logits, tokens, logsumexp, entropy, *([temperature] if each else []))
        ctx.temperature = None if each else temperature
        ctx.set_materialize_grads(False)  # so that an entropy that nobody asked for is told from one that is
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        """Return ((1[token] - p) · grad of the logprob - p (log p + entropy) · grad of the entropy) / temperature in
        the dtype of the logits. p is the softmax."""
        logits, tokens, logsumexp, entropy, *each = ctx.saved_tensors
        dlogprobs, dentropy = grads
        dlogprobs = torch.zeros_like(logsumexp) if dlogprobs is None else dlogprobs.contiguous()
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        _backward_kernel[len(tokens), -(-logits.shape[2] // _BLOCK)](
            *(logits, tokens, each[0] if each else ctx.temperature, logsumexp, dlogprobs),
            *(entropy, dlogprobs if dentropy is None else dentropy.contiguous(), dlogits),
            *(*logits.shape[1:], *logits.stride()[:2]),
            EACH=bool(each),
            ENTROPY=dentropy is not None,
            **_OPTIONS,
        )
        return dlogits, None, None


@triton.jit(do_not_specialize=["length", "entropy_ptr", "logsumexp_ptr"])
def _forward_kernel(
    logits_ptr, tokens_ptr, temperature, logprobs_ptr, entropy_ptr, logsumexp_ptr,
    length, vocabulary, batch_stride, stride, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row // length * batch_stride + row % length * stride
    inverse_temperature = _inverse(temperature, row, EACH)
    lane = tl.arange(0, BLOCK)[None, :]
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1, BLOCK), tl.float32)
    moment = tl.zeros((1, BLOCK), tl.float32)  # the sum of exp(y - peak) * (y - peak)
    for start in range(0, vocabulary, BLOCK):
        y = _scaled(logits_ptr, start + lane, vocabulary, inverse_temperature)
        new_peak = tl.maximum(peak, tl.max(y, 1))
        # A peak of -inf stands for no sum yet: everything so far is zero, and is moved by nothing.
        moved = tl.where(peak == float("-inf"), 0.0, tl.maximum(peak - new_peak, _FAR))[:, None]
        rescale = tl.exp(moved)
        y -= tl.where(new_peak == float("-inf"), 0.0, new_peak)[:, None]
        weight = tl.exp(y)
        moment = tl.fma(tl.fma(moved, total, moment), rescale, weight * tl.maximum(y, _FAR))
        total = tl.fma(total, rescale, weight)
        peak = new_peak
    total = pairwise_sum(total, BLOCK)
    log_total = tl.log(total)
    token = tl.load(tokens_ptr + row + tl.arange(0, 1))
    inside = (token >= 0) & (token < vocabulary)
    chosen = tl.load(logits_ptr + token, mask=inside, other=float("nan")).to(tl.float32) * inverse_temperature
    one = row + tl.arange(0, 1)
    tl.store(logprobs_ptr + one, (chosen - peak) - log_total)
    tl.store(entropy_ptr + one, log_total - tl.div_rn(pairwise_sum(moment, BLOCK), total))
    tl.store(logsumexp_ptr + one, peak + log_total)


@triton.jit(do_not_specialize=["length", "logsumexp_ptr", "dlogprobs_ptr", "entropy_ptr", "dentropy_ptr"])
def _backward_kernel(
    logits_ptr, tokens_ptr, temperature, logsumexp_ptr, dlogprobs_ptr, entropy_ptr, dentropy_ptr, dlogits_ptr,
    length, vocabulary, batch_stride, stride, EACH: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row // length * batch_stride + row % length * stride
    inverse_temperature = _inverse(temperature, row, EACH)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logprob = _scaled(logits_ptr, index, vocabulary, inverse_temperature) - tl.load(logsumexp_ptr + row)
    prob = tl.exp(logprob)
    hit = tl.where(index == tl.load(tokens_ptr + row), 1.0, 0.0)
    dlogits = (hit - prob) * (tl.load(dlogprobs_ptr + row) * inverse_temperature)
    if ENTROPY:
        # Where a token is excluded its probability is 0, and stays so with a finite factor.
        spread = prob * (tl.maximum(logprob, _FAR) + tl.load(entropy_ptr + row))
        dlogits -= spread * (tl.load(dentropy_ptr + row) * inverse_temperature)
    where = dlogits_ptr + row * vocabulary + index
    tl.store(where, cast(dlogits, dlogits_ptr.dtype.element_ty), mask=index < vocabulary)


@triton.jit
def _inverse(temperature, row, EACH: tl.constexpr):
    """1 / temperature of this row, by IEEE division. EACH: `temperature` points to one number for each row."""
    return tl.div_rn(1.0, tl.load(temperature + row) if EACH else temperature)


@triton.jit
def _scaled(logits_ptr, index, vocabulary, inverse_temperature):
    """Logits / temperature in FP32, -inf behind the vocabulary's end."""
    logits = tl.load(logits_ptr + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
    return logits * inverse_temperature
