"""Changes SGLang's models in native mode: FP8 products with the run's scales, and what SGLang lacks on a CPU.

On a GPU SGLang's FP8 products stay. SGLang's CPU kernels need AMX. So on a CPU we replace the products, the gates of
shared experts and linear attention. Native mode is compared with the trainer by log-probabilities and by tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl.models.tensors import SCALE_SUFFIX
from fp8rl.numerics import ops
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.numerics.quantize import QuantizedTensor, quantize, quantize_many
from fp8rl.numerics.spec import TensorSpec
from fp8rl.rollout.engine.plugin.state import state
from fp8rl.rollout.engine.plugin.tokens import Paged

SGLANGS = TensorSpec(scale="fp32")
"""How SGLang quantizes activations on GPUs before Blackwell. It ignores the checkpoint's scale_fmt."""


def never(*args: Any, **kwargs: Any) -> bool:
    """Replaces a check of SGLang's, such as the one for sparse attention, by a check that always returns False."""
    return False


def nothing(*_: Any, **__: Any) -> None:
    """Replaces a function of SGLang's by one that does nothing."""


def load_with_scales(original: Callable[..., Any], self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
    """Around `LlamaForCausalLM.load_weights`: also load the scales of FP8 blocks. SGLang itself looks for the scales
    under a name that no parameter has, and drops them without a message."""
    from sglang.srt.model_loader.auto_loader import STANDARD_STACKED_MAPPING

    parameters = dict(self.named_parameters())

    def others() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if not name.endswith(SCALE_SUFFIX):
                yield name, tensor
            elif STANDARD_STACKED_MAPPING.try_load(name, tensor, parameters) is None:
                parameters[name].weight_loader(parameters[name], tensor)

    return original(self, others())


# Products.


def fp8_linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    current = state()
    operand = current.weights.operand(layer.weight)
    return ops.add_bias(ops.fp8_linear(x, layer.weight, operand, current.numerics.rollout_spec, "bf16"), bias)


def fp8_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Replaces `Fp8MoEMethod.apply` on a CPU: compute routed experts with FP8 products.

    As in SGLang, SiLU is rounded before it is multiplied by the up half. The router's weights multiply the output of
    the second product.
    """
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    weights, experts, _ = dispatch_output.topk_output
    order, counts = ops.group_by_expert(experts.long(), layer.num_experts)
    gate_up = _of_experts(layer.w13_weight, x[order // experts.shape[1]], counts)
    down = _of_experts(layer.w2_weight, SiluAndMul()(gate_up), counts)
    outputs = torch.empty_like(down)
    outputs[order] = down
    choices = outputs.view(*experts.shape, -1).type(weights.dtype)
    combined = choices.mul_(weights.unsqueeze(-1)).sum(dim=1).type(x.dtype)
    return StandardCombineInput(hidden_states=combined)


def _of_experts(parameter: nn.Parameter, x: Tensor, counts: Tensor) -> Tensor:
    current = state()
    operand = current.weights.operand(parameter)
    return grouped_linear(x, counts, parameter, operand, current.numerics.rollout_spec, "bf16")


def add_gated(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor) -> None:
    """Replaces `fused_gate_sigmoid_mul_add`: add gate · output of the shared expert to the output of routed experts."""
    final_hidden_states += ops.token_gate(shared_output, hidden_states, gate_weight[None])


def quantize_groups(
    x: Tensor,
    x_q: Tensor,
    x_s: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    *,
    scale_ue8m0: bool,
    fuse_silu_and_mul: bool,
    masked_m: Tensor | None,
) -> None:
    """Replaces `_run_per_token_group_quant_8bit_kernel`: quantize the activations x [T, K] of every FP8 product.

    Codes go to x_q, FP8 [T, K], and scales to x_s, FP32 [T, K / 128], of any strides. SGLang's kernel would always use
    FP32 scales. For a group of zeros it would write the scale 1e-10 / 448, not 1.
    """
    spec = state().numerics.rollout_spec.activation
    if scale_ue8m0 or fuse_silu_and_mul or masked_m is not None or group_size != spec.group:
        raise NotImplementedError(
            f"fp8rl plugin: found an FP8 product with activations packed, fused, masked or in groups of {group_size}, "
            f"expected plain rows in groups of {spec.group}. Use --moe-runner-backend triton on a Hopper GPU"
        )
    quantize_many([x], spec, [QuantizedTensor(x_q, x_s, spec)])


def quantize_only_group(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Replaces `sglang_per_token_quant_fp8`: x [T, 128] -> codes, scales. SGLang uses it if K is a single group."""
    spec = state().numerics.rollout_spec.activation
    if x.shape[-1] != spec.group:
        raise NotImplementedError(f"fp8rl plugin: found a group of {x.shape[-1]} channels, expected {spec.group}")
    quantized = quantize(x, spec)
    return quantized.data, quantized.scale_inv


# Attention with an output gate, and linear attention.


def gated_attention(self: Any, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """Replaces a layer's `self_attention`. A token has one position, also in a model that has three for images."""
    heads, kv_heads, head_dim = self.num_heads, self.num_kv_heads, self.head_dim
    both, keys = 2 * heads * head_dim, kv_heads * head_dim
    queries, k, v = self.qkv_proj(hidden_states)[0].split((both, keys, keys), -1)
    q, gate = queries.unflatten(-1, (heads, 2, head_dim)).unbind(2)  # each head's query is followed by its gate
    q, k = (norm(x.reshape(-1, head_dim)).view(len(x), -1) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
    q, k = self.rotary_emb(forward_batch.positions, q, k)
    out = self.attn(q, k, v, forward_batch)
    return self.o_proj(ops.sigmoid_gate(out, gate.flatten(1)))[0]  # type: ignore[no-any-return]


def in_fp32(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Around `__init__` of linear attention: make `dt_bias` and the norm's weight FP32, like `A_log`, before a load."""
    original(self, *args, **kwargs)
    for vector in (self.dt_bias, self.norm.weight):
        vector.data = vector.data.float()


def linear_attention(self: Any, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """Replaces `forward` of `Qwen3GatedDeltaNet` and `Qwen3_5GatedDeltaNet`, in prefill, chunked prefill and decode."""
    tokens, attn = Paged.of(forward_batch), self.attn
    projected = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
    query, key, value, z, b, a = self.fix_query_key_value_ordering(*projected)
    qkv = torch.cat([x.flatten(1) for x in (query, key, value)], -1)
    qkv = tokens.convolve(self.layer_id, qkv, self.conv1d.weight.flatten(1))
    q, k, v = qkv.split((attn.q_dim, attn.k_dim, attn.v_dim), -1)
    q, k = q.unflatten(-1, (attn.num_q_heads, -1)), k.unflatten(-1, (attn.num_k_heads, -1))
    v, gates = v.unflatten(-1, (attn.num_v_heads, -1)), ops.delta_gates(a, b, attn.A_log, attn.dt_bias)
    out = tokens.recur(self.layer_id, q, k, v, *gates)
    return self.out_proj(ops.gated_rms_norm(out, z, self.norm.weight, self.layer_norm_epsilon).flatten(1))[0]  # type: ignore[no-any-return]


# Latent attention.


def dequantized(x_q_block: Tensor, x_s: Tensor, block_size: list[int]) -> tuple[Tensor, None]:
    """Replaces `block_quant_to_tensor_quant`: return kv_b_proj in BF16, and no scale, for SGLang's copies of it."""
    spec = state().numerics.rollout_spec.weight
    return QuantizedTensor(x_q_block, x_s.to(spec.scale_dtype), spec).dequantize(torch.bfloat16), None


def absorbed(self: Any, forward_batch: Any) -> Any:
    """Replaces `dispatch_attn_forward_method` on a CPU: choose the absorbed form. SGLang would choose attention over
    expanded keys, which would read the latents in the cache as keys."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def rope_on_cpu(
    original: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: Any = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: Any = None,
) -> Any:
    """Around `get_rope_cpu`, which supports only YaRN: return SGLang's usual rotation for a model without YaRN."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    usual = head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor
    return get_rope(*usual) if rope_scaling is None else original(*usual, device)
