"""Checkpoints as Qwen3.5 publishes them: a model of text and a tower for pictures, experts stacked, some in FP32."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16,
    "patch_size": 4,
}  # fmt: skip
PREPROCESSOR = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 4}


def with_tower(path: Path) -> Path:
    """Make the published form of a Qwen3.5 directory of text, in its place."""
    text = json.loads((path / "config.json").read_text())
    kind = text["model_type"].removesuffix("_text")
    text["rope_parameters"] |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    whole: dict[str, Any] = {
        "architectures": [text.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": kind, "text_config": text,
        "vision_config": VISION | {"out_hidden_size": text["hidden_size"], "model_type": f"{kind}_vision"},
        "image_token_id": 103, "video_token_id": 104, "vision_start_token_id": 105, "vision_end_token_id": 106,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }  # fmt: skip
    draw = torch.Generator().manual_seed(2)
    tensors = stacked({_published(name): tensor for name, tensor in load_file(path / "model.safetensors").items()})
    for name, tensor in tensors.items():
        if name.endswith(("A_log", "linear_attn.norm.weight")):  # FP32, and no values of BF16
            tensors[name] = tensor.float() + 1e-4 * torch.randn(tensor.shape, generator=draw)
    (path / "config.json").write_text(json.dumps(whole))
    for name, tensor in transformers_class(path)(AutoConfig.from_pretrained(path)).model.visual.state_dict().items():
        tensors[f"model.visual.{name}"] = torch.randn(tensor.shape, generator=draw).bfloat16()
    tensors["mtp.fc.weight"] = torch.randn(8, 16, generator=draw).bfloat16()
    tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.randn(2, 8, 4, generator=draw).bfloat16()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return path


def transformers_class(path: Path) -> type[PreTrainedModel]:
    """transformers' class of a directory."""
    config = json.loads((path / "config.json").read_text())
    module = importlib.import_module(f"transformers.models.{config['model_type']}")
    cls: type[PreTrainedModel] = getattr(module, config["architectures"][0])
    return cls


def _published(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of each layer in two tensors."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    for layer, by_kind in experts.items():
        gate, up, down = (
            torch.stack([held[expert] for expert in sorted(held)])
            for held in (by_kind[kind] for kind in ("gate_proj", "up_proj", "down_proj"))
        )
        found[f"{layer}.gate_up_proj"], found[f"{layer}.down_proj"] = torch.cat((gate, up), 1), down
    return found
