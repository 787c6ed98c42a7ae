"""Log-probabilities that runs recorded against a second forward of the same roundings, which shares no code with the
product.

It follows the table of docs/exactness.md for Llama and for the GLM-4.5 that examples/upcycle.py makes: BF16 where
the table rounds, torch's own products, rotation and activations, and as quantizer torch's own cast to E4M3. A forward
without these roundings (`float64`) is as far from the product as BF16 is from FP32.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from fp8rl.rl.experiment import load_experiment
from lab.bench.float64 import logprobs, quantized
from lab.bench.measure import Result
from lab.bench.runs import EXAMPLES, Run, run_into

SPEC = EXAMPLES / "smollm2.yaml"
NEAR = 1e-6
SPLIT = 128
"""Keys whose weights are added at once."""


def run() -> Iterator[Result]:
    """The share of recorded tokens whose log-probability the second forward has within `NEAR`: of the pretrained model,
    and of the weights that a run of it exported, from which a second run goes on. `examples/smollm2.py` makes the
    model."""
    settings = {"run.steps": 2, "rollout.staleness": 0, "eval.every": 0, "eval.problems": 4}
    model = (EXAMPLES / "models/smollm2_135m").absolute()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("as published", "exported after two steps"):
            made = run_into(Path(folder), Run(name, settings | {"model.path": model}, spec=SPEC))
            yield compared(f"SmolLM2-135M, {name}", model, made / "rollouts/step_1.jsonl")
            model = made / "model"


def compared(name: str, model: Path, rollouts: Path) -> Result:
    """Compare the log-probabilities of a first step's rollouts with those that the model which it began with gives."""
    forward, temperature, apart = Rounded(model), load_experiment(SPEC).rollout.temperature, []
    for row in (json.loads(line) for line in rollouts.read_text().splitlines()):
        tokens = torch.tensor(row["prompt_ids"] + row["token_ids"])
        expected = logprobs(forward(tokens) / temperature, tokens, len(row["token_ids"]))
        apart.append((torch.tensor(row["rollout_logprobs"]) - expected).abs())
    distances = torch.cat(apart)
    return Result(
        name=f"{name}: tokens whose log-probability a second forward has within {NEAR:g}",
        value=float((distances <= NEAR).double().mean()),
        bar=0.98,
        at_least=True,
        parts={
            "tokens": float(len(distances)),
            "equal": float((distances == 0).sum()),
            "largest distance": float(distances.max()),
        },
    )


@dataclass
class Rounded:
    """A forward of a Llama or of a mixture made of one, with FP8 in attention and MLPs, of one sequence at a time."""

    path: Path

    def __post_init__(self) -> None:
        self.config: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        files = sorted(self.path.glob("*.safetensors"))
        self.weights = {name: x for file in files for name, x in load_file(file).items()}
        for name, x in self.weights.items():
            if ".layers." in name and x.dim() == 2 and not name.endswith(".mlp.gate.weight"):
                self.weights[name] = _e4m3(x, 128)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits, FP32 (tokens, vocabulary), of one sequence of 16 tokens or more."""
        x = F.embedding(tokens, self.weights["model.embed_tokens.weight"])
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + self._attention(f"{at}self_attn.", self._norm(x, f"{at}input_layernorm"))
            normed = self._norm(x, f"{at}post_attention_layernorm")
            x = x + (self._mlp if f"{at}mlp.up_proj.weight" in self.weights else self._mixture)(f"{at}mlp.", normed)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return F.linear(self._norm(x, "model.norm"), head).float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return (wide * inverse * self.weights[f"{name}.weight"].float()).bfloat16()

    def _product(self, x: Tensor, name: str) -> Tensor:
        return F.linear(_e4m3(x, 1), self.weights[f"{name}.weight"])

    def _attention(self, at: str, x: Tensor) -> Tensor:
        c = self.config
        heads, shared, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q = self._rotated(self._product(x, f"{at}q_proj").view(-1, heads, width))
        k = self._rotated(self._product(x, f"{at}k_proj").view(-1, shared, width))
        v = self._product(x, f"{at}v_proj").view(-1, shared, width)
        q, k, v = (y.float().transpose(0, 1) for y in (q, k, v))
        k, v = (y.repeat_interleave(heads // shared, 0) for y in (k, v))
        peak = torch.full((heads, len(x), 1), -torch.inf)
        total, out = torch.zeros_like(peak), torch.zeros_like(q)
        for start in range(0, len(x), SPLIT):
            keys, values = (F.pad(y[:, start : start + SPLIT], (0, 0, 0, -len(x) % SPLIT)) for y in (k, v))
            later = torch.arange(start, start + SPLIT) > torch.arange(len(x))[:, None]
            scores = (q @ keys.transpose(1, 2) / math.sqrt(width)).masked_fill(later, -torch.inf)
            before, peak = peak, torch.maximum(peak, scores.amax(-1, keepdim=True))
            weights, kept = (scores - peak).exp(), (before - peak).exp()
            total, out = total * kept + weights.sum(-1, keepdim=True), out * kept + weights @ values
        return self._product((out / total).transpose(0, 1).flatten(1).bfloat16(), f"{at}o_proj")

    def _rotated(self, x: Tensor) -> Tensor:
        theta, width = self.config["rope_parameters"]["rope_theta"], x.shape[-1]
        frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
        (first, second), cos, sin = x.float().chunk(2, -1), angles.cos().float(), angles.sin().float()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).bfloat16()

    def _mlp(self, at: str, x: Tensor) -> Tensor:
        gate, up = (self._product(x, f"{at}{part}_proj").float() for part in ("gate", "up"))
        return self._product((F.silu(gate) * up).bfloat16(), f"{at}down_proj")

    def _mixture(self, at: str, x: Tensor) -> Tensor:
        """Each expert on every token; a token adds up those of its choice, the lower ids first."""
        scores = 1 / (1 + (-F.linear(x.float(), self.weights[f"{at}gate.weight"].float())).exp())
        biased = scores + self.weights[f"{at}gate.e_score_correction_bias"]
        experts = biased.topk(self.config["num_experts_per_tok"], -1).indices.sort(-1).values
        chosen = scores.gather(1, experts)
        shares = torch.zeros_like(scores).scatter(1, experts, chosen / (chosen.sum(-1, keepdim=True) + 1e-20))
        total = torch.zeros(x.shape)
        for expert in range(shares.shape[1]):
            total = total + self._mlp(f"{at}experts.{expert}.", x).float() * shares[:, expert, None]
        return total.bfloat16() + self._mlp(f"{at}shared_experts.", x)


def _e4m3(x: Tensor, rows: int) -> Tensor:
    """Return what BF16 rows are after E4M3; a product of a code and a power of two is exact in BF16."""
    return quantized(x.double(), rows).bfloat16()
