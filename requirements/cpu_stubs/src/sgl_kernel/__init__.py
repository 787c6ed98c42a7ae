"""CPU stand-in for sgl_kernel: the function that SGLang 0.5's CPU engine calls, and names that raise for the rest."""

import torch
from fp8rl_cpu_stubs import define_missing_ops, missing_names, refuse_with_cuda

refuse_with_cuda("sgl_kernel", "sglang-kernel")

__version__ = "0.0.0+cpustub"
__getattr__ = missing_names(__name__)
# What SGLang's models with linear attention look up in torch.ops when they are imported. Every other name stays absent:
# SGLang asks for some of them to find out what this package can do.
define_missing_ops(
    __name__,
    *("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu", "fused_sigmoid_mul_cpu"),
    *("fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu"),
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots into its row of the token pool, in place.

    req_pool_indices: [R] row of each request. req_to_token: [rows, pool_len] the pool. start_offset, end_offset: [R]
    half-open column range of each request. out_cache_loc: [sum(end - start)] slots, request after request.
    pool_len is the row stride that the CUDA kernel needs; the tensor knows its own here.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count
