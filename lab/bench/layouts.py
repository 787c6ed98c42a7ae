"""Exact mode over whole runs of each architecture: is d zero at every step, on which layout and however late?

The models are random, with two key-value heads, so that two ranks can share them; a reward that random models learn
from moves their weights. Prefills go in chunks of 96 tokens, and prefixes are cached.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import string
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fp8rl.models.tiny import TinyModel, write_tiny_model
from lab.bench.agreement import exact_steps, trained
from lab.bench.measure import Result

STEPS = 60
SETTINGS = {
    "run.steps": STEPS,
    "rollout.prompts_per_step": 4,
    "rollout.max_new_tokens": 10,
    "rollout.chunked_prefill_size": 96,
    "rollout.prefix_cache": "true",
    "rewards": "[{function: lab.bench.layouts:digits}]",
    "trainer.lr": 1e-3,
    "eval.every": 0,
    "eval.problems": 8,
    "checkpoint.every": STEPS,
}
_LATENT = TinyModel(layers=4, heads=4, intermediate=256, family="deepseek_v3")
MODELS = {
    "Qwen2": TinyModel(layers=4, intermediate=256, kv_heads=2, family="qwen2"),
    "OLMoE": TinyModel(layers=4, intermediate=256, hidden=256, kv_heads=2, family="olmoe"),
    "DeepSeek-V3 with YaRN": dataclasses.replace(_LATENT, yarn=True),
    "Kimi-K2's routing": dataclasses.replace(_LATENT, groups=1),
    "GLM-4.5": TinyModel(layers=4, intermediate=256, kv_heads=2, family="glm4_moe"),
    "Moonlight's queries": dataclasses.replace(_LATENT, groups=1, q_rank=0),
    "GLM-4.7-Flash": dataclasses.replace(_LATENT, groups=1, family="glm4_moe_lite"),
    "Mixtral": TinyModel(layers=4, intermediate=256, hidden=256, kv_heads=2, family="mixtral"),
}
LAYOUTS = {
    "tp 2 with ep 2": {"trainer.tp": 2, "trainer.ep": 2},
    "pp 2, S = 1 in flight": {"trainer.pp": 2, "rollout.staleness": 1, "rollout.in_flight": "true"},
}
SIGMOID = ("glm4_moe", "deepseek_v3", "glm4_moe_lite")
"""Families whose experts have biases."""


def digits(answer: str) -> float:
    """How many of the ten digits an answer has, of ten."""
    return len(set(answer) & set(string.digits)) / 10


def run() -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as name:
        for model, layout in itertools.product(MODELS, LAYOUTS):
            yield case(Path(name), model, layout)


def case(folder: Path, name: str, layout: str, **changes: object) -> Result:
    """The fraction of steps of one run in which every sampled token had d == 0."""
    shape, model = MODELS[name], folder / _word(name)
    if not model.exists():
        write_tiny_model(model, shape)
    settings: dict[str, object] = {"model.path": model, **SETTINGS, **LAYOUTS[layout]}
    if not shape.moe:
        settings.pop("trainer.ep", None)
    if shape.family in SIGMOID:
        settings["trainer.router_bias_rate"] = 0.001
    return exact_steps(f"{name}, {layout}", trained(folder, _word(f"{name} {layout}"), **{**settings, **changes}))


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text)
