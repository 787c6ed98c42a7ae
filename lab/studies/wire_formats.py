"""Gradients and weights between data-parallel ranks in fewer bytes: how many, how wrong, and what training loses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rl.numerics.core.process import all_gathered
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.config import GradientWire, WeightGather
from fp8rl.trainer.inventory import transfers
from lab.studies.harness import figures, live
from lab.studies.harness.claims import claims_of
from lab.studies.harness.lab import Lab, on_ranks
from lab.studies.harness.study import Measurement, Study, TextTable, with_interval
from lab.studies.harness.subjects import MODEL, TRAIN
from lab.studies.harness.training import CHAINS_PER_STEP, RATE, STEPS, TrainedArm, taught

if TYPE_CHECKING:
    from fp8rl.trainer.distributed.layout import Layout
    from fp8rl.trainer.step.batch import TokenBatch
    from fp8rl.trainer.trainer import Trainer

Local = tuple[Tensor, dist.ProcessGroup]
"""A flat FP32 buffer of gradients, and the ranks that it is to be added over."""
RANKS = 2
PLAIN = "gradients FP32, weights BF16"
UNSCALED = "gradients E4M3 unscaled"


@dataclass(frozen=True)
class Arm:
    """Formats in which two ranks send. scaled: gradients in FP8 have scales."""

    gradients: GradientWire = "fp32"
    weights: WeightGather = "bf16"
    scaled: bool = True

    def scaling(self) -> AbstractContextManager[None]:
        """Within it, gradients are cast without scales if the arm has none."""
        return nullcontext() if self.scaled else unscaled()


ARMS = {
    PLAIN: Arm(),
    f"{PLAIN}, again": Arm(),
    "gradients BF16": Arm("bf16"),
    "gradients E4M3": Arm("e4m3"),
    "gradients E5M2": Arm("e5m2"),
    UNSCALED: Arm("e4m3", scaled=False),
    "weights E4M3": Arm(weights="e4m3"),
}
QUICK_ARMS = (PLAIN, f"{PLAIN}, again", "gradients E4M3", UNSCALED, "weights E4M3")


def measure(lab: Lab) -> Measurement:
    """Every arm on the same two ranks, one after the other."""
    lab.specs["all arms"] = live.exact().spec.digest()
    chosen = {name: arm for name, arm in ARMS.items() if not lab.quick or name in QUICK_ARMS}
    first, *_ = on_ranks(RATE.model_copy(update={"dp": RANKS}), _on_rank, chosen, lab.seeds, lab.quick)
    sent = first[PLAIN]
    values: dict[str, dict[str, list[float]]] = {}
    for name, found in first.items():
        values[name] = {metric: [one[metric] for one in found] for metric in ("nll", "relative_error", "turned")}
        for metric in ("gradient_bytes", "weight_bytes"):
            values[name][metric] = [one[metric] / plain[metric] for one, plain in zip(found, sent, strict=True)]
    return Measurement(
        values=values,
        subject=f"M, 1.0M parameters, {RANKS} data-parallel ranks, {int(sent[0]['steps'])} SFT steps on right chains",
        details={"bytes": {metric: sent[0][metric] for metric in ("gradient_bytes", "weight_bytes")}},
    )


def _on_rank(
    layout: Layout, arms: Mapping[str, Arm], seeds: Sequence[int], quick: bool
) -> dict[str, list[dict[str, float]]]:
    """A row of numbers for each seed, by arm; the same on every rank."""
    gradients = {seed: _local_gradients(layout, seed) for seed in seeds}
    return {name: [_row(layout, arm, seed, quick, gradients[seed]) for seed in seeds] for name, arm in arms.items()}


def _row(layout: Layout, arm: Arm, seed: int, quick: bool, gradients: Sequence[Local]) -> dict[str, float]:
    config = RATE.model_copy(update={"dp": RANKS, "gradient_wire": arm.gradients, "weight_gather": arm.weights})
    counter = _Counted(layout.rank, arm)
    learner = TrainedArm(config=config, after_step=counter, change=counter.listening)
    done = taught(learner, seed, quick, layout, _shared_nll)
    error = {"relative_error": 0.0, "turned": 0.0}
    if arm.gradients != "fp32":
        with arm.scaling():
            error = _errors(gradients, arm.gradients)
    return {"nll": done.nll, "steps": len(done.losses), **done.noted, **error}


class _Counted:
    """Notes the bytes that this rank has sent in each step, as in a ring: of each sum and each gather, all except one
    part of the buffer. The gradient norm's 4 bytes are among the weights'."""

    def __init__(self, rank: int, arm: Arm) -> None:
        self._rank, self._arm = rank, arm
        self.noted: dict[str, list[float]] = {"gradient_bytes": [], "weight_bytes": []}

    @contextmanager
    def listening(self, trainer: Trainer) -> Iterator[None]:
        with self._arm.scaling(), transfers() as self._heard:
            yield

    def __call__(self, trainer: Trainer) -> None:
        def sent(*collectives: str) -> list[int]:
            return [one.bytes for one in self._heard if one.collective.startswith(collectives)]

        gradients, largest_of_blocks = sent("reduce_scatter", "alltoall"), sent("allreduce")
        # The ranks broadcast their parts of a buffer one after the other.
        weights = sent("allgather_into_tensor") + sent("broadcast")[self._rank :: RANKS]
        others = RANKS - 1
        self.noted["gradient_bytes"].append(sum(gradients) * others / RANKS)
        self.noted["weight_bytes"].append(sum(weights) * others + sum(largest_of_blocks) * 2 * others / RANKS)
        self._heard.clear()


@contextmanager
def unscaled() -> Iterator[None]:
    """Gradients in FP8 are cast as they are: a static range of 448 is a scale of 1."""
    from fp8rl.trainer.distributed.wires import SPECS

    kept = dict(SPECS)
    SPECS["e4m3"] = replace(SPECS["e4m3"], fixed=448.0)
    try:
        yield
    finally:
        SPECS.update(kept)


def _shared_nll(trainer: Trainer, batch: TokenBatch) -> float:
    """`live.nll` where each rank scores its own rows."""
    rows, logprobs = trainer.score(batch)
    chosen = logprobs[batch.loss_mask[rows]].double()
    parts = all_gathered((float(chosen.sum()), chosen.numel()))
    return -sum(total for total, _ in parts) / sum(count for _, count in parts)


def _local_gradients(layout: Layout, seed: int) -> list[Local]:
    """This rank's gradients of one batch before they are added to the other's."""
    config = RATE.model_copy(update={"dp": RANKS})
    trainer = live.trainer_of(MODEL, live.exact(), layout, config=config)
    model = trainer.optimizer.model
    kept: list[Local] = []

    def keep(group: Any) -> None:
        ranks = group.intra_distributed_optimizer_instance_group
        kept.extend((bucket.grad_data.clone(), ranks) for bucket in group.buckets)

    for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
        # In place of the sum, which would be written where they are.
        group.start_grad_sync = lambda *_, group=group, **__: keep(group)
    batch = live.chain_batch(TRAIN, seed * STEPS, CHAINS_PER_STEP)
    trainer.forward_backward(batch, SftObjective.of(batch))
    return kept


def _errors(gradients: Sequence[Local], wire: Any) -> dict[str, float]:
    """Errors of the sum over both ranks against float64: relative (Frobenius), and 1 - cosine."""
    from fp8rl.trainer.distributed.wires import reduce_scatter

    totals = torch.zeros(4, dtype=torch.float64)
    for flat, ranks in gradients:
        exact = torch.empty_like(flat, dtype=torch.float64)
        dist.all_to_all_single(exact, flat.double(), group=ranks)
        exact = exact.view(RANKS, -1).sum(0)
        found = reduce_scatter(flat, wire, ranks).double()
        dots = ((found - exact).square(), exact.square(), found.square(), found * exact)
        totals += torch.stack([dot.sum() for dot in dots])
    dist.all_reduce(totals)
    wrong, exact_squares, found_squares, product = totals.tolist()
    cosine = product / (exact_squares * found_squares) ** 0.5
    return {"relative_error": (wrong / exact_squares) ** 0.5, "turned": 1 - cosine}


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    drawn = figures.figure("Bytes that a rank sends in a step, of FP32 gradients and BF16 weights", height=3.6)
    names = list(measurement.values)
    shares = {
        label: [measurement.of(name, metric) for name in names]
        for label, metric in (("gradients", "gradient_bytes"), ("weights", "weight_bytes"))
    }
    figures.bars(drawn.axes[0], names, shares, label="share")
    wrong = figures.figure("What is wrong with the sum of two gradients")
    sent = [name for name in names if measurement.mean(name, "relative_error") > 0]
    series = {
        "relative error": [measurement.of(name, "relative_error") for name in sent],
        "1 - cosine": [measurement.of(name, "turned") for name in sent],
    }
    figures.bars(wrong.axes[0], sent, series, label="against float64", log=True)
    return {"bytes": drawn, "error": wrong}


def tables(measurement: Measurement) -> Sequence[TextTable]:
    rows = []
    for name in measurement.values:
        numbers = [f"{measurement.mean(name, metric):.4f}" for metric in ("gradient_bytes", "weight_bytes")]
        errors = [f"{measurement.mean(name, metric):.3g}" for metric in ("relative_error", "turned")]
        trained = with_interval(measurement.of(name, "nll", against=PLAIN), "+.5f")
        rows.append([name, *numbers, *errors, f"{measurement.mean(name, 'nll'):.5f}", trained])
    columns = ("arm", "gradient bytes", "weight bytes", "error of the sum", "1 - cosine", "held-out NLL", "above FP32")
    return [TextTable("Two data-parallel ranks", columns, rows)]


STUDY = Study(
    name="wire_formats",
    question="What may data-parallel ranks send each other in FP8?",
    seeds=5,
    claims=claims_of("wire_formats"),
    measure=measure,
    draw=draw,
    tables=tables,
    units={"nll": "nats", "turned": "(1 - cos)", "gradient_bytes": "of FP32's", "weight_bytes": "of BF16's"},
)
