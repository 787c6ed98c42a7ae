"""Small random Hugging Face models whose blocks align on up to two tensor-parallel ranks."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from fp8rl.models import read_model
from tests.support.tiny_model import TinyModel, write_tiny_model

VOCAB = 128
LENGTH = 512
LAYERS = 2
EXPERTS = 8
TOP_K = 2


def write_model(path: Path, *, moe: bool = True, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write a Qwen3-MoE (8 experts, top 2) or dense Qwen3 directory with weights large enough to matter."""
    torch.manual_seed(0)
    model = _build(moe, changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
            else:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(path)
    return path


def write_family(path: Path, shape: TinyModel, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a directory of any family: weights that matter, norms that are not one, biases that are not zero."""
    write_tiny_model(path, shape)
    draw = torch.Generator().manual_seed(0)
    tensors, zero_centered = load_file(path / "model.safetensors"), read_model(path).sizes.zero_centered_norms
    for name, tensor in tensors.items():
        norm_of_one = "linear_attn.norm" in name if zero_centered else "norm" in name
        spread, middle = (0.08, 0.0) if tensor.dim() > 1 else (0.2, float(norm_of_one))
        values = middle + spread * torch.randn(tensor.shape, generator=draw)
        tensors[name] = values.to(tensor.dtype if tensor.dtype == torch.float32 else dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def token_by_token(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model's linear attention go by transformers' rule for single tokens; to be called with use_cache=False."""
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):
            module.chunk_gated_delta_rule = _recurrent
    return model


def _recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **unused: Any) -> tuple[Tensor, None]:
    return torch_recurrent_gated_delta_rule(q, k, v, g, beta, None, False, True)  # type: ignore[no-any-return]


def reference(path: Path) -> PreTrainedModel:
    """The transformers model of a directory, in FP32."""
    cls = Qwen3MoeForCausalLM if "qwen3_moe" in (path / "config.json").read_text() else Qwen3ForCausalLM
    return cls.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def _build(moe: bool, changes: dict[str, Any]) -> PreTrainedModel:
    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False,
    }  # fmt: skip
    if not moe:
        return Qwen3ForCausalLM(Qwen3Config(**{**common, **changes}))
    experts = {"moe_intermediate_size": 128, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    which = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**common, **experts, **which, **changes}))
