"""A mixture of experts of a dense model: `python examples/upcycle.py SOURCE OUT`, from a Llama to the form of Mixtral.

Each MLP is copied into experts that differ by a seeded perturbation. A token's experts are weighted by probabilities
that sum to one, so that without perturbation the mixture computes what the dense model does (sparse upcycling,
Komatsuzaki et al. 2022, arXiv 2212.05055). Routers are random; embedding and output projection become two tensors.
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

SOURCE = "LlamaForCausalLM"
MATRICES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Mixtral's names of an MLP's matrices."""
ROUTER_STD = 0.02


def upcycle(source: Path, out: Path, experts: int = 4, top_k: int = 2, noise: float = 0.02, seed: int = 0) -> None:
    """Write the mixture.

    noise: standard deviation of the perturbation, as a share of each matrix's own.

    Raises:
        SystemExit: the source is no Llama of unscaled positions, or `out` exists.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["architectures"] != [SOURCE] or scaling.get("rope_type", "default") != "default":
        raise SystemExit(
            f"SOURCE: found {config['architectures']} with {scaling or 'no scaling'}, expected a {SOURCE} with "
            "unscaled positions. Choose another model."
        )
    if out.exists():
        raise SystemExit(f"OUT: found {out}, expected a directory that does not exist yet. Choose another one.")
    if not 0 < top_k <= experts:
        raise SystemExit(f"--top-k: found {top_k}, expected 1 to --experts = {experts}")
    mixture = config | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", ".*"))
    (partial / "config.json").write_text(json.dumps(mixture, indent=2) + "\n")
    found = dict(tensors(source, bool(config.get("tie_word_embeddings")), experts, noise, seed))
    save_file(found, partial / "model.safetensors", {"format": "pt"})
    partial.rename(out)


def tensors(source: Path, tied: bool, experts: int, noise: float, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the mixture's tensors by Mixtral's names. tied: the dense model's output projection is its embedding."""
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in stored(source):
        before, mlp, matrix = name.partition(".mlp.")
        if not mlp:
            yield name, tensor
            if name == "model.embed_tokens.weight" and tied:
                yield "lm_head.weight", tensor.clone()
            continue
        part = MATRICES[matrix.removesuffix(".weight")]
        for expert in range(experts):
            yield f"{before}.block_sparse_moe.experts.{expert}.{part}.weight", perturbed(tensor, noise, draw)
        if part == "w1":
            router = torch.randn(experts, tensor.shape[1], generator=draw) * ROUTER_STD
            yield f"{before}.block_sparse_moe.gate.weight", router.to(tensor.dtype)


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
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    upcycle(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
