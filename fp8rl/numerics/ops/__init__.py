"""Defines the ops of the forward pass, once for the trainer's modules and the engine's plugin.

Each op is row-invariant: a token's result does not depend on its batch, on padding, or on whether it is computed in a
prefill, a chunk or a decode step. Each docstring names the op's rounding points and its order of reduction. At its
start a process checks by `numerics.probe` that the machine's matrix library is row-invariant, too.
"""

# ruff: noqa: F401
from fp8rl.numerics.ops.attention import (
    AttentionInputs,
    TokenTree,
    attention,
    attention_dkv,
    attention_dq,
    attention_forward,
    packed_attention,
    paged_attention,
)
from fp8rl.numerics.ops.draw import draw, narrowed, token_logprobs, truncation_floors
from fp8rl.numerics.ops.experts import (
    ExpertWeights,
    combine,
    experts,
    group_by_expert,
    route,
    route_sigmoid,
    routed_experts,
    rows_of_pairs,
)
from fp8rl.numerics.ops.gated_delta import delta_gates, gated_delta_rule, paged_gated_delta_rule
from fp8rl.numerics.ops.gates import gated_rms_norm, sigmoid_gate, swiglu, token_gate
from fp8rl.numerics.ops.latent import (
    head_linear,
    head_term,
    latent_attention,
    packed_latent_attention,
    paged_latent_attention,
    tree_latent_attention,
)
from fp8rl.numerics.ops.linear import (
    add_bias,
    fp8_linear,
    fp8_linear_partial,
    linear,
    linear_partial,
    merge_partials,
    norm_fp8_linear,
    partial_sums,
    rows_linear,
    stacked,
    trained_operand,
    weight_operand,
)
from fp8rl.numerics.ops.low_rank import (
    Fused,
    LowRank,
    grouped_low_rank_term,
    low_rank_of,
    low_rank_term,
    merged,
    updates,
    with_adapter_gradient,
    with_term_gradient,
)
from fp8rl.numerics.ops.norm import add_rms_norm, norm_rows, one_plus, rms_norm
from fp8rl.numerics.ops.rope import HeadNorms, NewSlots, rope, rope_heads, rope_pairs
from fp8rl.numerics.ops.short_conv import causal_conv, paged_causal_conv
from fp8rl.numerics.ops.trees import add_by_token, gathered, tree_attention
