"""A mixture of experts of a dense model: `python examples/upcycle.py SOURCE OUT`, in the form of GLM-4.5.

The dense model is a Llama or a Mistral. Its last layers become mixtures: the first columns of such a layer's MLP become
the expert that every token takes, and the rest is copied into experts that differ by a seeded perturbation. A token's
experts are weighted by numbers that sum to one, so that without perturbation the mixture computes what the dense model
does (sparse upcycling, Komatsuzaki et al. 2022, arXiv 2212.05055). Routers are random; embedding and output projection
become two tensors.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SOURCES = ("LlamaForCausalLM", "MistralForCausalLM")
ROUTER_STD = 0.02
UNPADDED = "fp8rl_unpadded"
"""The key of config.json under which `fp8rl convert --pad` keeps the values before."""


def upcycle(
    source: Path,
    out: Path,
    layers: int = 10,
    experts: int = 4,
    top_k: int = 2,
    shared: int = 2,
    noise: float = 0.02,
    seed: int = 0,
) -> None:
    """Write the mixture.

    layers: the last ones, which become mixtures; GLM-4.5 needs a dense one before them.
    shared: widths of an expert that every token takes; an expert has 1 / (shared + 1) of the dense MLP's columns.
    noise: standard deviation of the perturbation, as a share of each matrix's own.

    Raises:
        SystemExit: the source is no Llama of unscaled positions, a number does not fit it, or `out` exists.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaled, window = scaling.get("rope_type", "default") != "default", config.get("sliding_window")
    if config["architectures"][0] not in SOURCES or scaled or window:
        raise SystemExit(
            f"SOURCE: found {config['architectures']} with {scaling or 'no scaling'} and a window of {window}, "
            f"expected {' or '.join(SOURCES)} with unscaled positions and no window. Choose another model."
        )
    if out.exists():
        raise SystemExit(f"OUT: found {out}, expected a directory that does not exist yet. Choose another one.")
    if not 0 < top_k <= experts:
        raise SystemExit(f"--top-k: found {top_k}, expected 1 to --experts = {experts}")
    if not 0 < layers < config["num_hidden_layers"]:
        raise SystemExit(
            f"--layers: found {layers}, expected 1 to {config['num_hidden_layers'] - 1}, all but the first"
        )
    if shared < 1 or config["intermediate_size"] % (shared + 1):
        raise SystemExit(
            f"--shared: found {shared}, expected 1 or more, such that {shared} + 1 divides the intermediate_size "
            f"{config['intermediate_size']}"
        )
    changes = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "first_k_dense_replace": config["num_hidden_layers"] - layers,
        "moe_intermediate_size": config["intermediate_size"] // (shared + 1),
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "n_shared_experts": shared,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"} | scaling | {"partial_rotary_factor": 1.0},
        "tie_word_embeddings": False,
    }
    mixture = config | changes
    if UNPADDED in config:  # what stays of the padding
        mixture[UNPADDED] = {name: value for name, value in config[UNPADDED].items() if name not in changes}
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", ".*"))
    (partial / "config.json").write_text(json.dumps(mixture, indent=2) + "\n")
    tied = bool(config.get("tie_word_embeddings"))
    found = dict(tensors(source, mixture, tied, noise, torch.Generator().manual_seed(seed)))
    save_file(found, partial / "model.safetensors", {"format": "pt"})
    partial.rename(out)


def tensors(
    source: Path, mixture: dict[str, Any], tied: bool, noise: float, draw: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Yield the mixture's tensors by GLM-4.5's names. tied: the dense model's output projection is its embedding."""
    experts, width = mixture["n_routed_experts"], mixture["moe_intermediate_size"]
    for name, tensor in stored(source):
        layer, _, matrix = name.removeprefix("model.layers.").partition(".mlp.")
        if not matrix or int(layer) < mixture["first_k_dense_replace"]:
            yield name, tensor
            if name == "model.embed_tokens.weight" and tied:
                yield "lm_head.weight", tensor.clone()
            continue
        columns = 1 if matrix.startswith("down") else 0
        whole = tensor.shape[columns]
        common, routed = tensor.split((whole - width, width), columns)
        at = f"model.layers.{layer}.mlp"
        yield f"{at}.shared_experts.{matrix}", common.contiguous()
        for expert in range(experts):
            yield f"{at}.experts.{expert}.{matrix}", perturbed(routed, noise, draw)
        if matrix.startswith("gate"):
            router = torch.randn(experts, tensor.shape[1], generator=draw) * ROUTER_STD
            yield f"{at}.gate.weight", router.to(tensor.dtype)
            yield f"{at}.gate.e_score_correction_bias", torch.zeros(experts)


def stored(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a directory's safetensors files."""
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                yield name, opened.get_tensor(name)


def perturbed(tensor: Tensor, noise: float, draw: torch.Generator) -> Tensor:
    return (tensor + noise * tensor.float().std() * torch.randn(tensor.shape, generator=draw)).to(tensor.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--shared", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    upcycle(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
