"""Whole runs of `fp8rl train`: one table of specs with overrides and of what must hold of their metrics, one runner.

Most ask whether d is zero at every step, however the engines are asked, on whatever layout and however late. The demo's
trained model is grown to four layers there (`deepen`), or models are random, with two key-value heads that two ranks
can share, and learn from a reward that random models learn from.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.record.metrics_log import Row, read_metrics
from lab.bench.measure import DEMO, Result
from tests.support.tiny_model import TinyModel, write_tiny_model

EXAMPLES = Path("examples")
ARITHMETIC = EXAMPLES / "arithmetic.yaml"
Runs = Mapping[str, list[Row]]
Expectation = Callable[[str, Runs], Result]
"""What must hold of the run of this name, beside those before it."""


@dataclass(frozen=True)
class Run:
    """One run: a spec with overrides, and what must hold of it."""

    name: str
    overrides: Mapping[str, object]
    expect: tuple[Expectation, ...] = ()
    spec: Path = ARITHMETIC
    model: Path | TinyModel | None = None
    """In place of the spec's: one to deepen, or a random one."""


@dataclass(frozen=True)
class WholeRuns:
    """A benchmark of whole runs; `runs` lists them when they are wanted."""

    runs: Callable[[], list[Run]]
    at_once: int = 1

    def results(self) -> Iterator[Result]:
        """Measure the runs in their order, and judge each as soon as it has ended; one that fails ends no other.

        Raises:
            RuntimeError: after the last, naming the runs that failed.
        """
        done: dict[str, list[Row]] = {}
        failed = []
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(self.at_once) as threads:
            started = [(run, threads.submit(measured, Path(folder), run)) for run in self.runs()]
            try:
                for run, rows in started:
                    try:
                        done[run.name] = rows.result()
                        found = [expectation(run.name, done) for expectation in run.expect]
                    # A KeyError: it is compared with one that failed.
                    except (subprocess.CalledProcessError, KeyError) as error:
                        failed.append(f"{run.name}: {error!r}")
                        continue
                    yield from found
            finally:
                threads.shutdown(cancel_futures=True)
        if failed:
            raise RuntimeError("; ".join(failed))


def measured(folder: Path, run: Run) -> list[Row]:
    """The metrics of a run, whose directory lies in a folder."""
    return read_metrics(run_into(folder, run) / "metrics.jsonl")


def run_into(folder: Path, run: Run) -> Path:
    """Train; the run's directory, which lies in a folder."""
    overrides = dict(run.overrides)
    if run.model is not None:
        path = folder / "models" / _word(str(run.model))
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            deepen(run.model, path) if isinstance(run.model, Path) else write_tiny_model(path, run.model)
        overrides["model.path"] = path
    settings = (f"{key}={value}" for key, value in overrides.items())
    command = [str(Path(sys.executable).with_name("fp8rl")), "train", str(run.spec)]
    name = _word(run.name)
    subprocess.run(
        [*command, f"run.dir={folder}", f"run.name={name}", *settings], check=True, stdout=subprocess.DEVNULL
    )
    return folder / name


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


def exact(name: str, runs: Runs) -> Result:
    return exact_steps(name, runs[name])


def accurate(name: str, runs: Runs) -> Result:
    """The accuracy that this run ends below the synchronous one."""
    rows, synchronous = runs[name], runs["synchronous"]
    ends = rows[-1]["eval/accuracy"], synchronous[-1]["eval/accuracy"]
    return Result(
        name=f"accuracy after {STEPS} steps, synchronous - {name}",
        value=ends[1] - ends[0],
        bar=0.03,
        at_least=False,
        parts={"before": rows[0]["eval/accuracy"], "synchronous": ends[1], name: ends[0]},
    )


def same_rows(name: str, runs: Runs) -> Result:
    """The fraction of rows that equal those of the synchronous run, but for time."""
    rows = runs[name]
    same = sum(timeless(row) == timeless(other) for row, other in zip(rows, runs["synchronous"], strict=True))
    return Result(f"rows equal to those of one engine: {name}", same / len(rows), 1.0, True, {"rows": len(rows)})


def timeless(row: Row) -> Row:
    """A row without what time it took."""
    return {key: x for key, x in row.items() if not key.startswith("perf/") and not key.endswith("seconds")}


def learnt(name: str, runs: Runs) -> Result:
    """Held-out accuracy of the last seed's run and those before it."""
    ends = [rows[-1]["eval/accuracy"] for rows in _of_seeds(name, runs)]
    return Result(
        name=f"held-out accuracy, least of seeds {SEEDS[0]}-{SEEDS[-1]}: {name.rpartition('-')[0]}",
        value=min(ends),
        bar=0.8,
        at_least=True,
        parts={
            "before": _of_seeds(name, runs)[0][0]["eval/accuracy"],
            "mean": statistics.mean(ends),
            "most": max(ends),
        },
    )


def exact_in_all(name: str, runs: Runs) -> Result:
    """Steps of the runs of all seeds in which every fresh token agreed."""
    steps = [row for rows in _of_seeds(name, runs) for row in rows[1:]]
    equal = sum(row["mismatch/exact_frac"] == 1.0 for row in steps)
    parts = {"tokens": sum(row["mismatch/tokens"] for row in steps)}
    return Result(f"steps with d == 0: {name.rpartition('-')[0]}", equal / len(steps), 1.0, at_least=True, parts=parts)


def _of_seeds(name: str, runs: Runs) -> list[list[Row]]:
    return [runs[f"{name.rpartition('-')[0]}-{seed}"] for seed in SEEDS]


def as_accurate(name: str, runs: Runs) -> Result:
    """The accuracy that trees lose against rows end to end, in the mean of pairs of one seed."""
    ends = {side: [runs[f"{side}-{seed}"][-1]["eval/accuracy"] for seed in PAIRS] for side in ("end to end", "tree")}
    lost = [flat - tree for flat, tree in zip(ends["end to end"], ends["tree"], strict=True)]
    half = T_95 * statistics.stdev(lost) / len(lost) ** 0.5
    return Result(
        name=f"accuracy after {STEPS} steps, rows end to end - tree, mean of {len(lost)} seeds",
        value=statistics.mean(lost),
        bar=0.02,
        at_least=False,
        parts={side: statistics.mean(each) for side, each in ends.items()} | {"95% interval, +-": half},
    )


def waits_little(name: str, runs: Runs) -> Result:
    """The share of a step that a reward takes which waits for each of its answers."""
    slow, plain = _steady(runs[name]), _steady(runs["plain"])
    return Result(
        name=f"reward that waits {WAIT_S} s for each of 256 answers: its phase / step",
        value=_share("reward", slow),
        bar=0.10,
        at_least=False,
        parts={
            "reward (s)": _median("reward", slow),
            "step (s)": _median("step", slow),
            "step without it (s)": _median("step", plain),
            "one after the other (s)": 256 * WAIT_S,
        },
    )


def little_overhead(name: str, runs: Runs) -> Result:
    rows = _steady(runs[name])
    parts = {"overhead (s)": _median("overhead", rows), "step (s)": _median("step", rows)}
    return Result(f"loop overhead / step: {name}", _share("overhead", rows), 0.05, at_least=False, parts=parts)


def loop_overhead(name: str, runs: Runs) -> Result:
    rows = _steady(runs[name])
    parts = {f"{phase} (s)": _median(phase, rows) for phase in ("step", "rollout", "train", "monitor", "overhead")}
    return Result(
        name="loop overhead / step (demo, steps without evaluation or checkpoint)",
        value=_share("overhead", rows),
        bar=0.015,
        at_least=False,
        parts=parts | {"sync (s)": statistics.median(row["sync/seconds"] for row in rows)},
    )


def cheap_proof(name: str, runs: Runs) -> Result:
    """Monitors, and what a sync without proof leaves out; the refresh of what the engine computes with counts too."""
    from lab.bench.sync import measure

    rows, measured = _steady(runs[name]), measure(DEMO)
    verification = statistics.median(a - b for a, b in zip(measured.verified, measured.unverified, strict=True))
    monitors, step = _median("monitor", rows), _median("step", rows)
    return Result(
        name="monitors and verification / step (the same steps)",
        value=(monitors + verification) / step,
        bar=0.03,
        at_least=False,
        parts={"monitors (s)": monitors, "verification (s)": verification, "step (s)": step},
    )


def _steady(rows: list[Row]) -> list[Row]:
    """The steps after warm-up without evaluation or checkpoint."""
    others = {"perf/eval_seconds", "perf/checkpoint_seconds"}
    return [row for row in rows if row["step"] > 4 and not others & row.keys()]


def _median(phase: str, rows: list[Row]) -> float:
    return statistics.median(row[f"perf/{phase}_seconds"] for row in rows)


def _share(phase: str, rows: list[Row]) -> float:
    return statistics.median(row[f"perf/{phase}_seconds"] / row["perf/step_seconds"] for row in rows)


def deepen(source: Path, out: Path) -> None:
    """The model of `source` with every layer followed by a copy whose contribution to the residual is scaled down, so
    that it still answers often enough to learn from, and every layer takes part in every logprob."""
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
        faint = 0.25 if "o_proj" in leaf or "down_proj" in leaf else 1.0
        deeper[f"{prefix}layers.{2 * int(layer)}.{leaf}"] = tensor
        deeper[f"{prefix}layers.{2 * int(layer) + 1}.{leaf}"] = (tensor * faint).clone()
    save_file(deeper, out / "model.safetensors", {"format": "pt"})


def digits(answer: str) -> float:
    """The share of the ten digits that an answer has."""
    return len(set(answer) & set(string.digits)) / 10


async def waits(answer: str) -> float:
    """A reward that asks nobody and waits as long as a service may take."""
    await asyncio.sleep(WAIT_S)
    return 0.0


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text)


STEPS, SEEDS, WAIT_S = 60, (0, 1, 2), 0.2
PAIRS, T_95 = (0, 1, 2, 3, 4), 2.776
"""Seeds that two arms share, and Student's t of 95% for so many pairs."""
_CHUNKS = {"rollout.chunked_prefill_size": 96, "rollout.prefix_cache": "true", "checkpoint.every": STEPS}
_DEEP = {"run.steps": STEPS, "rollout.prompts_per_step": 16, "eval.problems": 64} | _CHUNKS
_FEW = {"eval.every": 0, "eval.problems": 8}
_RANDOM = {
    "run.steps": STEPS,
    "rollout.prompts_per_step": 4,
    "rollout.max_new_tokens": 10,
    "rewards": "[{function: lab.bench.runs:digits}]",
    "trainer.lr": 1e-3,
    **_FEW,
    **_CHUNKS,
}
_LATENT = TinyModel(layers=4, heads=4, intermediate=256, family="deepseek_v3")
MODELS = {
    "Qwen3": TinyModel(layers=4, intermediate=256, kv_heads=2, experts=0),
    "Qwen3-MoE": TinyModel(layers=4, intermediate=256, kv_heads=2),
    "Qwen2": TinyModel(layers=4, intermediate=256, kv_heads=2, family="qwen2"),
    "OLMoE": TinyModel(layers=4, intermediate=256, hidden=256, kv_heads=2, family="olmoe"),
    "DeepSeek-V3 with YaRN": replace(_LATENT, yarn=True),
    "Kimi-K2's routing": replace(_LATENT, groups=1),
    "GLM-4.5": TinyModel(layers=4, intermediate=256, kv_heads=2, family="glm4_moe"),
    "Moonlight's queries": replace(_LATENT, groups=1, q_rank=0),
    "GLM-4.7-Flash": replace(_LATENT, groups=1, family="glm4_moe_lite"),
    "Llama-3, heads of 64": TinyModel(
        layers=4, intermediate=256, heads=8, kv_heads=4, head_dim=64, tied=True, family="llama"
    ),
    "Mistral": TinyModel(layers=4, intermediate=256, kv_heads=2, family="mistral"),
    "DeepSeek-V3.2": replace(_LATENT, yarn=True, family="deepseek_v32"),
    "GLM-5": replace(_LATENT, groups=1, family="glm_moe_dsa"),
    "Qwen3-Next": TinyModel(layers=4, intermediate=256, kv_heads=2, family="qwen3_next"),
    "Qwen3.5": TinyModel(layers=4, intermediate=256, kv_heads=2, family="qwen3_5_text"),
    "Qwen3.5-MoE": TinyModel(layers=4, intermediate=256, kv_heads=2, family="qwen3_5_moe_text"),
    "Mixtral": TinyModel(layers=4, intermediate=256, hidden=256, kv_heads=2, family="mixtral"),
}
LAYOUTS: dict[str, dict[str, object]] = {
    "tp 2 with ep 2": {"trainer.tp": 2, "trainer.ep": 2},
    "pp 2, S = 1 in flight": {"trainer.pp": 2, "rollout.staleness": 1, "rollout.in_flight": "true"},
}


def _agreement() -> list[Run]:
    return [
        Run(
            f"4 layers, 8 experts, temperature {temperature}, {engines} engine(s)",
            {**_DEEP, "rollout.temperature": temperature, "rollout.engines": engines},
            (exact,),
            model=DEMO,
        )
        for temperature, engines in itertools.product((1.0, 0.7), (1, 2))
    ]


def _layouts() -> list[Run]:
    runs = []
    for (name, shape), (layout, settings) in itertools.product(MODELS.items(), LAYOUTS.items()):
        chosen = {**_RANDOM, **settings}
        if not shape.moe:
            chosen.pop("trainer.ep", None)
        if shape.family in ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"):  # with biases
            chosen["trainer.router_bias_rate"] = 0.001
        runs.append(Run(f"{name}, {layout}", chosen, (exact,), model=shape))
    return runs


def _linear() -> list[Run]:
    """Linear attention, two engines each: what of a run may move a state, beside the layouts of every model."""
    cases: dict[str, dict[str, object]] = {
        "tp 2 with ep 2, top-p 0.9": LAYOUTS["tp 2 with ep 2"] | {"rollout.top_p": 0.9},
        "pp 2, S = 1 in flight": LAYOUTS["pp 2, S = 1 in flight"],
        "adapters": {"adapter": "{rank: 8, alpha: 16, experts: per_expert, mode: separate}"},
    }
    return [
        Run(f"{name}, 2 engines, {case}", {**_RANDOM, "rollout.engines": 2, **settings}, (exact,), model=MODELS[name])
        for name, (case, settings) in itertools.product(("Qwen3-Next", "Qwen3.5-MoE"), cases.items())
    ]


def _algorithms() -> list[Run]:
    return _examples("algorithm")


def _architectures() -> list[Run]:
    demo = load_experiment(ARITHMETIC).model
    return [run for run in _examples("model", "trainer") if load_experiment(run.spec).model != demo]


def _examples(*sections: str) -> list[Run]:
    """The arithmetic example, and those that differ from it in these sections alone; each seed, judged at the last."""
    base = load_experiment(ARITHMETIC)
    same = {section: getattr(base, section) for section in (*sections, "run")}
    found = sorted(EXAMPLES.glob("arithmetic*.yaml"))
    specs = [spec for spec in found if load_experiment(spec).model_copy(update=same) == base]
    return [
        Run(f"{spec.stem}-{seed}", {"run.seed": seed}, (learnt, exact_in_all) if seed == SEEDS[-1] else (), spec)
        for spec, seed in itertools.product(specs, SEEDS)
    ]


def _asynchrony() -> list[Run]:
    deep: dict[str, object] = {**_DEEP, "eval.problems": 256}
    flying = {"rollout.staleness": 1, "rollout.in_flight": "true"}
    three = {"rollout.engines": 3, "rollout.chunked_prefill_size": 33, "rollout.prefix_cache": "false"}
    return [
        Run("synchronous", deep | {"rollout.staleness": 0}, (exact, accurate), model=DEMO),
        Run("one step off", deep | {"rollout.staleness": 1}, (exact, accurate), model=DEMO),
        Run("in flight, S = 1", deep | flying, (exact, accurate), model=DEMO),
        Run("in flight, S = 3", deep | {"rollout.staleness": 3}, (exact, accurate), model=DEMO),
        Run("2 engines", deep | {"rollout.engines": 2}, (same_rows,), model=DEMO),
        Run("3 engines, chunks of 33, no prefix cache", deep | three, (same_rows,), model=DEMO),
    ]


def _shared() -> list[Run]:
    """The demo with rows end to end and with trees, one seed after the other."""
    sides = {"end to end": {"trainer.packing": "true"}, "tree": {"trainer.prefix_sharing": "true"}}
    runs = [
        Run(f"{side}-{seed}", {"run.seed": seed, "eval.every": 0, "eval.problems": 256, **keys}, (exact,))
        for seed, (side, keys) in itertools.product(PAIRS, sides.items())
    ]
    return [*runs[:-1], replace(runs[-1], expect=(exact, as_accurate))]


def _functions() -> list[Run]:
    """Costs of a user's functions: a reward that waits, and an environment of several turns."""
    few: dict[str, object] = {"run.steps": 12, **_FEW}
    waiting = "[{function: integer}, {function: lab.bench.runs:waits, weight: 0.0}]"
    return [
        Run("plain", few),
        Run("a reward that waits", few | {"rewards": waiting}, (waits_little, little_overhead)),
        Run("an environment of three turns", few, (little_overhead,), EXAMPLES / "guess.yaml"),
    ]


agreement = WholeRuns(_agreement)
layouts = WholeRuns(_layouts)
linear = WholeRuns(_linear)
algorithms = WholeRuns(_algorithms, at_once=2)
architectures = WholeRuns(_architectures, at_once=2)
asynchrony = WholeRuns(_asynchrony)
shared = WholeRuns(_shared, at_once=2)
functions = WholeRuns(_functions)
loop = WholeRuns(lambda: [Run("overhead", {"run.steps": 14, **_FEW}, (loop_overhead, cheap_proof))])
