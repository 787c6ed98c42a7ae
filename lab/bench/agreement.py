"""Exact mode over whole runs of a deeper model: is d zero at every step, however the engines are asked?

The demo's trained model is grown to four layers: each of its layers is followed by a fainter copy of itself, so that
the model still answers often enough to learn from, and every layer takes part in every logprob.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8rl.rl.record.metrics_log import Row, read_metrics
from lab.bench.measure import Result

STEPS = 60
SETTINGS = {
    "run.steps": STEPS,
    "rollout.prompts_per_step": 16,
    "rollout.chunked_prefill_size": 96,
    "rollout.prefix_cache": "true",
    "eval.problems": 64,
    "checkpoint.every": STEPS,
}
FAINTER = 0.25
MODEL = Path("examples/models/tiny_qwen3_moe")


def run() -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "four_layers"
        deepen(MODEL, model)
        for temperature, engines in itertools.product((1.0, 0.7), (1, 2)):
            yield exactness(Path(folder), model, temperature, engines)


def exactness(folder: Path, model: Path, temperature: float, engines: int) -> Result:
    """The fraction of steps in which every sampled token had d == 0."""
    rows = trained(
        folder,
        f"t{temperature}-e{engines}",
        **SETTINGS,
        **{"model.path": model, "rollout.temperature": temperature, "rollout.engines": engines},
    )
    return exact_steps(f"4 layers, 8 experts, temperature {temperature}, {engines} engine(s)", rows)


def trained(folder: Path, name: str, **settings: object) -> list[Row]:
    """The rows of a whole run of the arithmetic example into `folder`/`name`."""
    return run_example(Path("examples/arithmetic.yaml"), folder, name, **settings)


def run_example(spec: Path, folder: Path, name: str, **settings: object) -> list[Row]:
    """The rows of a whole run of a spec into `folder`/`name`."""
    subprocess.run(
        [
            *(Path(sys.executable).with_name("fp8rl"), "train", spec),
            *(f"run.dir={folder}", f"run.name={name}"),
            *(f"{key}={value}" for key, value in settings.items()),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return read_metrics(folder / name / "metrics.jsonl")


def exact_steps(what: str, rows: list[Row]) -> Result:
    """The fraction of steps in which tokens of the trainer's weights were compared, and each had d == 0."""
    steps = [row for row in rows if row["step"] > 0]
    exact = sum(row.get("mismatch/exact_frac") == 1.0 and row["mismatch/nonfinite_count"] == 0 for row in steps)
    return Result(
        name=f"steps with d == 0: {what}",
        value=exact / len(steps),
        bar=1.0,
        at_least=True,
        parts={
            "tokens": sum(row["mismatch/tokens"] for row in steps),
            "largest |d|": max(row.get("mismatch/train_rollout_logprob_abs_diff_max", 0.0) for row in steps),
            "reward first": steps[0]["rollout/reward_mean"],
            "reward last": steps[-1]["rollout/reward_mean"],
        },
    )


def deepen(source: Path, out: Path) -> None:
    """The model of `source` with every layer followed by a copy whose contribution to the residual is scaled down."""
    shutil.copytree(source, out)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] *= 2
    config.pop("layer_types", None)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    deeper: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        prefix, _, rest = name.partition("layers.")
        if not rest:
            deeper[name] = tensor
            continue
        layer, _, leaf = rest.partition(".")
        faint = FAINTER if "o_proj" in leaf or "down_proj" in leaf else 1.0
        deeper[f"{prefix}layers.{2 * int(layer)}.{leaf}"] = tensor
        deeper[f"{prefix}layers.{2 * int(layer) + 1}.{leaf}"] = (tensor * faint).clone()
    save_file(deeper, out / "model.safetensors", {"format": "pt"})
