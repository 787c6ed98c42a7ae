"""Looks for keys that make a spec fit. It tries keys that cost nothing, then keys that cost time, layouts, more GPUs.

The last resort is native mode, if no layout on any number of GPUs holds the one-rank engine of exact mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any

from fp8rl.diagnose.plan import layouts
from fp8rl.diagnose.plan.subject import PlanSubject, is_apart, job_on
from fp8rl.rl.experiment import Experiment, parse_experiment, with_keys
from fp8rl.rl.experiment.budget.fit import fullest, with_cache
from fp8rl.rl.experiment.budget.job import GPUS_PER_NODE, Gpu
from fp8rl.rl.experiment.budget.memory import engine_memory
from fp8rl.rl.experiment.preconditions.rules import broken_rules
from fp8rl.trainer.config import TrainerSection

MOST_GPUS = 1024
_SIZES = ("tp", "pp", "ep", "dp", "cp")
_LAYOUT = "another layout"
Keys = Mapping[str, Any]

ORDER = (
    "trainer.head_chunk_tokens",
    "trainer.micro_batch_tokens",
    "rollout.sleep",
    "trainer.recompute=experts",
    _LAYOUT,
    "trainer.recompute=layer",
    "rollout.max_total_tokens",
    "trainer.optimizer.offload",
    "trainer.optimizer.moments",
)
"""The order in which keys are tried. A key is tried after all sets of the keys before it have failed. Smaller chunks
cost almost nothing. Engines that `sleep` wait. Recomputing repeats a part of each forward pass. With a cache of one row
answers wait. An update on the host waits for the bus. Moments in BF16 lose digits. The order was set by hand."""


def keys_that_fit(
    subject: PlanSubject, gpu: Gpu, gpus: int | None = None, length: int | None = None
) -> dict[str, Any] | None:
    """Return the keys to set, by dotted name. Empty: the spec fits already. None: no keys make it fit.

    gpus: the number of GPUs for the trainer and for engines that share them. None: the number in the spec's layout (8
    for a model alone), doubled until the spec fits. With adapters only the spec's own layout is tried.
    """
    base = subject.experiment
    world = gpus or (base.trainer.world_size if subject.chosen else GPUS_PER_NODE)
    most = world if gpus or subject.shape.adapters else MOST_GPUS
    for mode in dict.fromkeys((base.numerics.mode, "native")):
        if not _loads(with_keys(base, {"numerics.mode": mode})):
            continue
        count = world
        while count <= most:
            for fraction in dict.fromkeys((base.rollout.memory_fraction, None)):  # null: SGLang's own
                first = {"numerics.mode": mode, "rollout.memory_fraction": fraction}
                if found := _first(subject, first, gpu, count, length, gpus is not None):
                    return _differing(subject, found)
            count *= 2
    return None


def _first(subject: PlanSubject, first: Keys, gpu: Gpu, gpus: int, length: int | None, no_more: bool) -> Keys | None:
    """Return the first keys in `ORDER`, with the first layout, that leave the slack; None if none do.

    no_more: engines that share GPUs with the trainer get no GPUs of their own.
    """
    based = replace(subject, experiment=with_keys(subject.experiment, first))
    fixed = {**first, **dense_layers_in_bf16(based, gpu)}
    base = with_keys(based.experiment, fixed)
    based = replace(subject, experiment=base)
    engines = _engine_ranks(based, gpu, no_more)
    own = [base.trainer] if subject.chosen and base.trainer.world_size == gpus else []
    blocks = base.numerics_config().blocks_spec
    others = [each for each in layouts.layouts(subject.shape, base.trainer, gpus, blocks) if each not in own]
    if subject.shape.adapters and own:
        others = []

    def fitting(keys: Keys, some: list[TrainerSection]) -> Keys | None:
        tried = (_with_engines(base, {**fixed, **keys}, ranks) for ranks in engines)
        found = (_in_layout(subject, each, layout, gpu, length) for each in tried for layout in some)
        return next((keys for keys in found if keys is not None), None)

    savings = list(_savings(based, length))
    # The most keys with each choice of the optimizer's keys, some of which some modes refuse.
    longest = {
        frozenset(key for key in keys if key.startswith("trainer.optimizer")): keys for keys in sorted(savings, key=len)
    }
    if not any(fitting(keys, [*own, *others]) for keys in longest.values()):
        return None
    ladder = [(_place(keys, keys), keys, own) for keys in savings]
    ladder += [(_place([*keys, _LAYOUT], keys), keys, others) for keys in savings]
    found = (fitting(keys, some) for _, keys, some in sorted(ladder, key=lambda each: each[0]))
    return next((keys for keys in found if keys is not None), None)


def _place(names: Iterable[str], keys: Keys) -> list[int]:
    """Return the keys' places in `ORDER`, the last place first. Sets of keys are tried in the order of these lists."""
    return sorted((ORDER.index(name if name in ORDER else f"{name}={keys[name]}") for name in names), reverse=True)


def _in_layout(subject: PlanSubject, keys: Keys, layout: TrainerSection, gpu: Gpu, length: int | None) -> Keys | None:
    """Return `keys` and the layout's keys if they leave the slack and break no rule, else None."""
    keys = {**keys, **{f"trainer.{name}": getattr(layout, name) for name in _SIZES}}
    experiment = with_keys(subject.experiment, keys)
    job = job_on(replace(subject, experiment=experiment), gpu, length)
    apart = is_apart(experiment, job)
    if not layouts.leaves_slack(fullest(with_cache(job, experiment, gpu.memory, apart), apart).peak, gpu):
        return None
    if any(broken_rules(experiment, subject.shape, layouts.target(gpu))) or not _loads(experiment):
        return None
    return keys


def _loads(experiment: Experiment) -> bool:
    """Return whether a spec with these values loads. Some contradict each other, such as adapters in native mode."""
    return layouts.accepted(parse_experiment, experiment.to_dict())


def _savings(subject: PlanSubject, length: int | None) -> Iterator[dict[str, Any]]:
    """Yield sets of keys that save memory, and the empty set."""
    base = subject.experiment
    trainer, rollout, row = base.trainer, base.rollout, length or base.rollout.context_length
    colocated = base.needs_engines and not (rollout.staleness or base.sync.delta or base.sync.engines_own_gpus)
    caches = base.needs_engines and (rollout.max_total_tokens or 0) > rollout.context_length
    recomputing: list[dict[str, Any]] = [{}]
    if trainer.recompute != "layer":
        recomputing += [{"trainer.recompute": "experts"}] if subject.shape.sizes.moe else []
        recomputing += [{"trainer.recompute": "layer"}]
    optimizer: list[dict[str, Any]] = [{}]
    if not trainer.optimizer.offload:
        optimizer += [{"trainer.optimizer.moments": "bf16"}] if trainer.optimizer.moments == "fp32" else []
        optimizer += [{"trainer.optimizer.offload": True}]
    choices: list[list[dict[str, Any]]] = [
        [{}, {"trainer.head_chunk_tokens": 1024}] if trainer.head_chunk_tokens > 1024 else [{}],
        [{}, {"trainer.micro_batch_tokens": row}] if trainer.micro_batch_tokens > row else [{}],
        [{}, {"rollout.sleep": True}] if colocated and not rollout.sleep else [{}],
        recomputing,
        optimizer,
        [{}, {"rollout.max_total_tokens": rollout.context_length}] if caches else [{}],
    ]
    for parts in product(*choices):
        yield {key: value for part in parts for key, value in part.items()}


def dense_layers_in_bf16(subject: PlanSubject, gpu: Gpu) -> Keys:
    """Return the key that keeps a mixture's dense first layers in BF16, if their width is no multiple of a block."""
    base, sizes = subject.experiment, subject.shape.sizes
    dense = sizes.layers - sizes.moe_layers
    if not sizes.moe or not dense or base.numerics.first_layers_bf16 >= dense:
        return {}
    plain = with_keys(base, {f"trainer.{name}": 1 for name in _SIZES} | {"rollout.tp": 1})
    widths = any("intermediate_size" in error.key for error in broken_rules(plain, subject.shape, layouts.target(gpu)))
    return {"numerics.first_layers_bf16": dense} if widths else {}


def _engine_ranks(subject: PlanSubject, gpu: Gpu, no_more: bool) -> list[int]:
    """Return the numbers of ranks at which an engine alone on its GPUs leaves the slack. Exact mode allows only 1."""
    base = subject.experiment
    if not base.needs_engines:
        return [1]
    job = replace(job_on(subject, gpu), kv_tokens=base.rollout.context_length)
    most = 1 if base.numerics.mode == "exact" or (no_more and not is_apart(base, job)) else GPUS_PER_NODE
    able = [ranks for ranks in layouts.engine_widths(job) if ranks <= most]
    return [ranks for ranks in able if layouts.leaves_slack(engine_memory(replace(job, engine_tp=ranks)).peak, gpu)]


def _with_engines(base: Experiment, keys: Keys, ranks: int) -> Keys:
    """Return `keys` with engines of `ranks` ranks. Engines of several ranks have their own GPUs and need not sleep."""
    if ranks == 1:
        return {**keys, "rollout.tp": 1}
    own = {} if base.sync.engines_own_gpus else {"sync.transport": "distributed"}
    return {key: value for key, value in keys.items() if key != "rollout.sleep"} | {"rollout.tp": ranks, **own}


def _differing(subject: PlanSubject, keys: Keys) -> dict[str, Any]:
    """Return the keys that differ from the spec's. If the spec has no layout, also return the whole layout."""
    layout = () if subject.chosen else tuple(f"trainer.{name}" for name in _SIZES[:4])
    found = {key: reduce(getattr, key.split("."), subject.experiment) for key in keys}
    return {key: value for key, value in keys.items() if found[key] != value or key in layout}


def written(keys: Keys) -> list[str]:
    """Return keys as arguments of the command line."""
    plain = {"True": "true", "False": "false", "None": "null"}
    return [f"{key}={plain.get(str(value), value)}" for key, value in keys.items()]
