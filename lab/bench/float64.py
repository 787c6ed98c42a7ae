"""Log-probabilities that runs recorded against a forward in float64, which shares no code with the product.

The forward follows the papers and transformers' config: the gated delta rule token by token, attention with an output
gate, experts one by one. Its quantizer is torch's own cast to E4M3. Nothing else is rounded.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lab.bench.measure import Result
from lab.bench.runs import EXAMPLES, Run, run_into

MODELS = ("qwen3_next", "qwen3_5")
PRECISIONS: dict[str, dict[str, object]] = {"bf16": {"numerics.trainer": "bf16", "numerics.rollout": "bf16"}, "fp8": {}}
RECORDED, OF_FP8 = "recorded", "change by FP8"


def run() -> Iterator[Result]:
    """The mean distance of recorded log-probabilities from the float64 forward's: in BF16 over that of transformers in
    BF16, in FP8 over what FP8 itself changes."""
    for model in MODELS:
        path = EXAMPLES / f"models/tiny_{model}"
        for precision, overrides in PRECISIONS.items():
            rows = _recorded(EXAMPLES / f"arithmetic_{model}.yaml", overrides)
            yield compared(f"{model}, {precision}", path, rows, precision == "fp8")


def compared(name: str, path: Path, rows: list[dict[str, Any]], quantized: bool) -> Result:
    plain = Float64(path, quantized=False)
    own = Float64(path, quantized=True) if quantized else plain
    theirs = {
        what: AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        for what, dtype in (("transformers in BF16", torch.bfloat16), ("transformers in FP32", torch.float32))
    }
    apart: dict[str, list[Tensor]] = {what: [] for what in (RECORDED, *([OF_FP8] if quantized else []), *theirs)}
    for row in rows:
        tokens = torch.tensor(row["prompt_ids"] + row["token_ids"])
        of_tokens = partial(logprobs, tokens=tokens, count=len(row["token_ids"]))
        unquantized, expected = of_tokens(plain(tokens)), of_tokens(own(tokens))
        apart[RECORDED].append((torch.tensor(row["rollout_logprobs"], dtype=torch.float64) - expected).abs())
        if quantized:
            apart[OF_FP8].append((expected - unquantized).abs())
        with torch.no_grad():
            for what, model in theirs.items():
                apart[what].append((of_tokens(model(tokens[None]).logits[0].double()) - unquantized).abs())
    means = {what: float(torch.cat(values).mean()) for what, values in apart.items()}
    floor = OF_FP8 if quantized else "transformers in BF16"
    return Result(
        name=f"{name}: mean |recorded - float64| / {'mean change by FP8' if quantized else 'that of ' + floor}",
        value=means[RECORDED] / means[floor],
        bar=1.0,
        at_least=False,
        parts={"tokens": float(sum(len(x) for x in apart[RECORDED])), **means},
    )


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Of the last `count` tokens, each by the logits before it."""
    return F.log_softmax(logits[-count - 1 : -1], -1).gather(1, tokens[-count:, None])[:, 0]


def _recorded(spec: Path, overrides: dict[str, object]) -> list[dict[str, Any]]:
    """The answers of a run's first step, which the weights that it starts from gave."""
    settings = {"run.steps": 1, "rollout.prompts_per_step": 16, "eval.every": 0, "eval.problems": 8, **overrides}
    with tempfile.TemporaryDirectory() as folder:
        made = run_into(Path(folder), Run("recorded", settings, spec=spec))
        lines = (made / "rollouts/step_1.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def quantized(x: Tensor, rows: int) -> Tensor:
    """Blocks of `rows` x 128 in E4M3, each times the least power of two that keeps its largest value in range."""
    height, width = x.shape
    blocks = x.reshape(height // rows, rows, width // 128, 128)
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-10)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return ((blocks / scale).to(torch.float8_e4m3fn).double() * scale).reshape(height, width)


@dataclass
class Float64:
    """A forward of Qwen3-Next or Qwen3.5 in float64; quantized: FP8 products take operands rounded to E4M3."""

    path: Path
    quantized: bool

    def __post_init__(self) -> None:
        self.config = json.loads((self.path / "config.json").read_text())
        files = sorted(self.path.glob("*.safetensors"))
        self.weights = {name: x.double() for file in files for name, x in load_file(file).items()}

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (tokens, vocabulary) of one sequence."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer, kind in enumerate(self.config["layer_types"]):
            at = f"model.layers.{layer}."
            mixer = self._delta if kind == "linear_attention" else self._attention
            x = x + mixer(at, self._norm(x, f"{at}input_layernorm"))
            x = x + self._experts(f"{at}mlp.", self._norm(x, f"{at}post_attention_layernorm"))
        return self._norm(x, "model.norm") @ self.weights["lm_head.weight"].T

    def _product(self, x: Tensor, name: str) -> Tensor:
        """A product that the spec has in FP8."""
        weight = self.weights[f"{name}.weight"]
        if self.quantized:
            x, weight = quantized(x, 1), quantized(weight, 128)
        return x @ weight.T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm whose weight is stored zero-centered."""
        return self._rms(x) * (1 + self.weights[f"{name}.weight"])

    def _rms(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def _delta(self, at: str, x: Tensor) -> Tensor:
        c, name = self.config, f"{at}linear_attn."
        keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv, each = c["linear_key_head_dim"], c["linear_value_head_dim"], values // keys
        mixed, z, b, a = self._projected(name, x, keys, dk, each * dv, each)
        kernel = self.weights[f"{name}conv1d.weight"][:, 0]
        padded = F.pad(mixed.T, (kernel.shape[1] - 1, 0))
        taps = [padded[:, i : i + len(x)] * kernel[:, i : i + 1] for i in range(kernel.shape[1])]
        mixed = F.silu(torch.stack(taps).sum(0)).T
        q, k, v = mixed.split((keys * dk, keys * dk, values * dv), -1)
        q, k = (self._unit(y.reshape(-1, keys, dk)).repeat_interleave(each, 1) for y in (q, k))
        v = v.reshape(-1, values, dv)
        decay = -self.weights[f"{name}A_log"].exp() * F.softplus(a + self.weights[f"{name}dt_bias"])
        state, rows = torch.zeros(values, dk, dv, dtype=torch.float64), []
        for t in range(len(x)):
            state = state * decay[t].exp()[:, None, None]
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], error * torch.sigmoid(b[t])[:, None])
            rows.append(torch.einsum("hkv,hk->hv", state, q[t] / math.sqrt(dk)))
        out = self._rms(torch.stack(rows)) * self.weights[f"{name}norm.weight"]
        return self._product((out * F.silu(z.reshape(-1, values, dv))).flatten(1), f"{name}out_proj")

    def _projected(self, name: str, x: Tensor, keys: int, dk: int, dv: int, each: int) -> tuple[Tensor, ...]:
        """q|k|v before the convolution, z, b and a; a Qwen3-Next stores them together, by heads of keys."""
        if f"{name}in_proj_qkv.weight" in self.weights:
            b, a = (x @ self.weights[f"{name}in_proj_{part}.weight"].T for part in "ba")
            return self._product(x, f"{name}in_proj_qkv"), self._product(x, f"{name}in_proj_z"), b, a
        parts = self._product(x, f"{name}in_proj_qkvz").reshape(len(x), keys, -1).split((dk, dk, dv, dv), -1)
        q, k, v, z = (part.flatten(1) for part in parts)
        ba = (x @ self.weights[f"{name}in_proj_ba.weight"].T).reshape(len(x), keys, 2, each)
        return torch.cat((q, k, v), -1), z, ba[:, :, 0].flatten(1), ba[:, :, 1].flatten(1)

    @staticmethod
    def _unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    def _attention(self, at: str, x: Tensor) -> Tensor:
        c, name = self.config, f"{at}self_attn."
        heads, shared, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q, gate = self._product(x, f"{name}q_proj").reshape(len(x), heads, 2, width).unbind(2)
        k = self._product(x, f"{name}k_proj").reshape(len(x), shared, width)
        v = self._product(x, f"{name}v_proj").reshape(len(x), shared, width)
        q, k = self._rotated(self._norm(q, f"{name}q_norm")), self._rotated(self._norm(k, f"{name}k_norm"))
        k, v = (y.repeat_interleave(heads // shared, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(width)
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v)
        return self._product((out * torch.sigmoid(gate)).flatten(1), f"{name}o_proj")

    def _rotated(self, x: Tensor) -> Tensor:
        """The first part of each head is rotated, halves against each other; the rest stays."""
        rope = self.config["rope_parameters"]
        width = int(x.shape[-1] * rope["partial_rotary_factor"])
        frequencies = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
        first, second, rest = x.split((width // 2, width // 2, x.shape[-1] - width), -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def _experts(self, name: str, x: Tensor) -> Tensor:
        probabilities = (x @ self.weights[f"{name}gate.weight"].T).softmax(-1)
        chosen, experts = probabilities.topk(self.config["num_experts_per_tok"], -1)
        chosen = chosen / chosen.sum(-1, keepdim=True)
        out = self._mlp(f"{name}shared_expert.", x) * torch.sigmoid(
            x @ self.weights[f"{name}shared_expert_gate.weight"].T
        )
        for expert in experts.unique().tolist():
            rows, slots = (experts == expert).nonzero(as_tuple=True)
            out[rows] += self._mlp(f"{name}experts.{expert}.", x[rows]) * chosen[rows, slots, None]
        return out

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = (self._product(x, f"{name}{part}_proj") for part in ("gate", "up"))
        return self._product(F.silu(gate) * up, f"{name}down_proj")
