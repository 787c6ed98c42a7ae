"""The certificate of a dump, `fp8rl certify DUMP`: it compares the log-probabilities of engine and trainer with a
forward pass of the model itself and of our ops, on the same tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fp8rl.diagnose.measure import difference, one_rank, one_trainer, score_recorded
from fp8rl.diagnose.report import Difference
from fp8rl.models import read_model
from fp8rl.models.checkpoint.reading import check_stored
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl_certify.dump import reference as theirs
from fp8rl_certify.dump.dump_report import DumpReport, SideReport, Verdict, WorstRow
from fp8rl_certify.dump.explain import LEFT_OUT, Looks, explanations, row_means
from fp8rl_certify.dump.floor import Floor, Side, floors, mean, written
from fp8rl_certify.dump.reading import read_dump
from fp8rl_certify.dump.rows import Dump, DumpRow, Sampling
from fp8rl_certify.dump.tokens import ENGINE, TRAINER, Tokens, check_fits, chosen, flat, histogram, parts

if TYPE_CHECKING:
    from fp8rl.trainer.scorer import Scorer

BUDGET = 50_000
"""Number of tokens that are scored, including prompts."""
UNRELATED = 0.5
"""A side is unrelated to the model if their rank correlation is below this number, and if their difference also spreads
as much as the log-probabilities. (If a model is sure of its tokens, little noise is enough to mix the ranks.)"""
WORST = 12


def certify_dump(
    path: Path,
    model: Path | None = None,
    *,
    sampling: Callable[[Sampling], Sampling] = lambda default: default,
    preset: str = "fp8_block_pow2",
    budget: int = BUDGET,
    say: Callable[[str], object] = lambda text: None,
) -> DumpReport:
    """Score at most `budget` tokens of a dump, with the weights of `model` or the weights that the dump names.

    sampling: returns the settings for rows without settings of their own, from the dump's common settings. preset: if
    the dump does not say its numerics, our ops score it in BF16 and in this preset.

    Raises:
        UserError: the dump or the model cannot be used, or they do not fit each other.
    """
    began = time.monotonic()
    dump = read_dump(path, model)
    directory = model or dump.model
    if directory is None:
        raise user_error(
            "--model",
            found="none",
            expected="the Hugging Face directory of the weights that sampled the dump",
            remedy="Give --model DIR.",
        )
    default = sampling(dump.sampling or Sampling())
    some = chosen(dump.rows, budget)
    rows, places = [dump.rows[number] for number in some], [dump.places[number] for number in some]
    samplings = [row.sampling(default) for row in rows]
    about = theirs.facts(directory)
    check_fits(rows, places, about.vocabulary, about.positions, directory)
    tokens = Tokens.of(rows, samplings, about.special)
    checkpoint = None if model else dump.checkpoint
    with _exported(directory, checkpoint, dump.numerics) as weights:
        looks = Looks(rows, samplings, about.bos)
        say(f"scoring {sum(len(row.tokens) for row in rows):,} tokens with transformers in FP32")
        full = flat(theirs.scored(weights, torch.float32, rows, samplings, looks), rows)
        say("scoring them in BF16, for the floor")
        both: tuple[theirs.Attention, ...] = (None, "eager")
        in_bf16 = [theirs.scored(weights, torch.bfloat16, rows, samplings, attention=each) for each in both]
        halves = [flat(each, rows) for each in in_bf16]
        half = max(halves, key=lambda each: _mean(_difference(full, each)))
        say("scoring them with our exact ops")
        by_numerics, why = _by_our_ops(weights, _numerics(dump, preset), rows, samplings)
    mine = {name: flat(each, rows) for name, each in by_numerics.items()}
    floor, entropy = Floor(full, halves), flat(looks.entropy, rows)
    sides = [_side(name, Side(said, floor, entropy), mine, tokens, looks) for name, said in tokens.said.items()]
    apart = {name: (said - full).abs() for name, said in (tokens.said | {"floor": half}).items()}
    engine, trainer = tokens.said[ENGINE], tokens.said.get(TRAINER)
    return DumpReport(
        dump=str(path),
        kind=dump.kind,
        model=str(directory) if checkpoint is None else str(checkpoint),
        rows=len(rows),
        of_rows=len(dump.rows),
        tokens=len(tokens.ids),
        temperatures=tokens.temperature.unique().tolist(),
        floor=_difference(full, half),
        ours={name: _difference(full, each) for name, each in mine.items()},
        why_not_ours=why,
        sides=sides,
        between=None if trainer is None else _difference(trainer, engine),
        parts=parts(tokens, full, apart),
        histogram=histogram(apart),
        worst=_worst(tokens, apart, places),
        notes=_notes(dump, rows, default, tokens, full, why),
        unread=dump.unread,
        seconds=round(time.monotonic() - began, 1),
    )


def _side(name: str, side: Side, mine: dict[str, Tensor], tokens: Tokens, looks: Looks) -> SideReport:
    said, full = side.said, side.floor.full
    apart = _difference(full, said)
    against = {numerics: _difference(each, said) for numerics, each in mine.items()}
    known = apart.mean is not None and apart.nonfinite <= LEFT_OUT * (apart.tokens + apart.nonfinite)
    verdict: Verdict = "within the floor" if known and side.within else "above the floor"
    if any(each.zero for each in against.values()):
        return SideReport(name, "equal", apart, against)
    ours = [mean(floors(each, full, side.floor.of(each))) for each in mine.values()]
    causes, tried = explanations(tokens, side, looks, ours)
    unrelated = verdict == "above the floor" and _is_unrelated(full, said)
    verdict = "broken" if causes or unrelated else verdict
    return SideReport(name, verdict, apart, against, causes, unrelated, tried, side.floor.times(side.away), side.slope)


def _is_unrelated(full: Tensor, said: Tensor) -> bool:
    """Return whether a side's finite log-probabilities are unrelated to the model's (see UNRELATED)."""
    used = full.isfinite() & said.isfinite()
    full, said = full[used], said[used]
    ranks = torch.stack([_ranks(full), _ranks(said)])
    if len(full) < 3 or not (ranks.std(1) > 0).all():
        return False
    return torch.corrcoef(ranks)[0, 1].item() < UNRELATED and bool((said - full).std() >= full.std())


def _ranks(values: Tensor) -> Tensor:
    """Return the rank of each value. Equal values get the mean of their ranks."""
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[which]


def _mean(each: Difference) -> float:
    return math.inf if each.mean is None else each.mean


def _difference(first: Tensor, second: Tensor) -> Difference:
    """Compare on the tokens for which `second` is not NaN."""
    return difference(first[None], second[None], ~second.isnan()[None])


def _worst(tokens: Tokens, apart: dict[str, Tensor], places: list[str]) -> list[WorstRow]:
    means = {
        name: row_means(tokens, each, each.isfinite(), len(places)) for name, each in apart.items() if name != "floor"
    }
    size = torch.stack(list(means.values())).nan_to_num(0.0).amax(0)
    counts = torch.bincount(tokens.row, minlength=len(places)).tolist()
    return [
        WorstRow(places[number], counts[number], {name: _finite(each[number].item()) for name, each in means.items()})
        for number in size.argsort(descending=True, stable=True)[:WORST].tolist()
    ]


def _notes(dump: Dump, rows: list[DumpRow], default: Sampling, tokens: Tokens, full: Tensor, why: str) -> list[str]:
    notes = []
    if dump.sampling is None and any(row.temperature is None for row in rows):
        notes.append(f"temperature {default.temperature:g} where the dump does not say one (--temperature)")
    for name, said in tokens.said.items():
        step, form = written(said)
        if form:
            size = (0.5 * step * torch.ones_like(said)).nanmean().item()
            notes.append(f"{name}'s log-probabilities are rounded to {form}: mean |d| {size:.1e} by itself")
    outside = int(full.isinf().sum())
    if outside:
        notes.append(f"{outside:,} tokens are none of those that top-p, top-k and min-p leave in FP32; not compared")
    if why:
        notes.append(f"our ops have not scored all of it: {why}")
    if dump.unread:
        notes.append(f"not read: {', '.join(dump.unread)}")
    return notes


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# Scores tokens with our exact ops: the trainer's forward pass, one rank of it in this process.

_MICRO_BATCH = 4096
_CHUNK = 64
"""Number of rows of a batch. It is small, because results are gathered and rows are padded to the longest."""


def _numerics(dump: Dump, preset: str) -> dict[str, NumericsConfig]:
    """Return the numerics to score in: an exact run's own, for each side if they differ; else BF16 and a preset."""
    run, spec = dump.numerics, QuantSpec.preset(preset)
    if run is None or run.mode != "exact":
        plain = NumericsConfig(spec=QuantSpec.preset("bf16"), trainer="bf16", rollout="bf16")
        coded = {f"ours, FP8 ({preset})": NumericsConfig(spec=spec)} if spec.quantized else {}
        return {"ours, BF16": plain, **coded}
    if run.trainer_spec == run.rollout_spec:
        return {"ours, in the run's numerics": run}
    return {"ours, as the run's trainer": run, "ours, as the run's engine": replace(run, trainer=run.rollout)}


def _by_our_ops(
    path: Path, numerics: Mapping[str, NumericsConfig], rows: Sequence[DumpRow], samplings: Sequence[Sampling]
) -> tuple[dict[str, dict[int, Tensor]], str]:
    """Score rows by our ops in exact mode: float64 [T] by name of the numerics and by row. Return also why some are
    missing, in words.

    Possible reasons: an unknown architecture, sizes that do not fit a spec, results that depend on the batch here.
    """
    found: dict[str, dict[int, Tensor]] = {}
    config, first = TrainerSection(micro_batch_tokens=_MICRO_BATCH), next(iter(numerics.values()))
    try:
        check_stored(path, read_model(path))
        with one_rank(config, first) as layout:
            from fp8rl.trainer.scorer import Scorer

            longest = max(len(row.tokens) for row in rows)
            scorer = Scorer(TrainerSpec(path, config, first, 0, 1, longest), layout)
            for name, each in numerics.items():
                scorer.set_numerics(each)
                found[name] = _of_all(scorer, rows, samplings)
    except UserError as error:
        return found, str(error)
    return found, ""


@contextmanager
def _exported(model: Path, checkpoint: Path | None, numerics: NumericsConfig | None) -> Iterator[Path]:
    """Yield a Hugging Face directory with a checkpoint's weights, for the block; `model` if there is no checkpoint."""
    if checkpoint is None or numerics is None:
        yield model
        return
    with TemporaryDirectory(prefix="fp8rl-certify-") as folder:
        with one_trainer(model, numerics, micro_batch_tokens=_MICRO_BATCH, longest=1) as trainer:
            trainer.load(checkpoint)
            trainer.export_hf(Path(folder) / "model")
        yield Path(folder) / "model"


def _of_all(scorer: Scorer, rows: Sequence[DumpRow], samplings: Sequence[Sampling]) -> dict[int, Tensor]:
    """Score the rows, those with equal sampling together, right-padded. Return float64 [T] for each answer, by row."""
    found = {}
    for sampling in dict.fromkeys(samplings):
        numbers = [number for number, each in enumerate(samplings) if each == sampling]
        for at in range(0, len(numbers), _CHUNK):
            some = numbers[at : at + _CHUNK]
            lengths = torch.tensor([len(rows[number].tokens) for number in some])
            prompts = torch.tensor([[rows[number].prompt_length] for number in some])
            padded = pad_sequence([torch.tensor(rows[number].tokens) for number in some], batch_first=True)
            places = torch.arange(padded.shape[1])
            answers = (places >= prompts) & (places < lengths[:, None])
            batch = TokenBatch(padded, lengths, answers, temperature=sampling.divisor, truncation=sampling.truncation)
            for number, said, mask in zip(some, score_recorded(scorer, batch).logprobs, answers, strict=True):
                found[number] = said[mask].double().cpu()
    return found
