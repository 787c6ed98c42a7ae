"""Small random Hugging Face models whose blocks align on up to two tensor-parallel ranks."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from fp8rl.models import read_model
from tests.support.tiny_model import TinyModel, write_tiny_model

VOCAB = 128
LENGTH = 512
LAYERS = 2
EXPERTS = 8
TOP_K = 2


def write_model(path: Path, *, moe: bool = True, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write a Qwen3-MoE (8 experts, top 2) or dense Qwen3 directory. changes: of `TinyModel`."""
    sizes: dict[str, Any] = {"layers": LAYERS, "hidden": 256, "heads": 4, "kv_heads": 2, "vocab": VOCAB}
    sizes |= {"experts": EXPERTS, "top_k": TOP_K} if moe else {"experts": 0, "intermediate": 256}
    return write_family(path, TinyModel(**sizes | {"max_positions": LENGTH} | changes), dtype)


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
    """transformers' model of a directory in FP32, in which each token's embedding has a gradient. Its linear attention
    goes token by token: that in chunks is up to 5e-5 of a logit away from it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.model.embed_tokens.padding_idx = None
    return token_by_token(model)
