"""Scores tokens with our exact ops: the trainer's forward pass, one rank of it in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fp8rl.diagnose.certify.dump.rows import DumpRow, Sampling
from fp8rl.diagnose.one_rank import one_rank, one_trainer
from fp8rl.models import read_model
from fp8rl.models.checkpoint.reading import check_stored
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.step.batch import TokenBatch

_MICRO_BATCH = 4096
_CHUNK = 64
"""Rows of a batch: its log-probabilities are gathered, and a longer row pads the others."""


def numerics_of(preset: str) -> dict[str, NumericsConfig]:
    """Return the numerics to score a dump in that does not say its own: BF16, and a preset."""
    spec = QuantSpec.preset(preset)
    plain = NumericsConfig(spec=QuantSpec.preset("bf16"), trainer="bf16", rollout="bf16")
    coded = {f"ours, FP8 ({preset})": NumericsConfig(spec=spec)} if spec.quantized else {}
    return {"ours, BF16": plain, **coded}


def numerics_of_run(numerics: NumericsConfig) -> dict[str, NumericsConfig]:
    """Return the numerics that a run in exact mode computed in: one, or another on each side."""
    if numerics.trainer_spec == numerics.rollout_spec:
        return {"ours, in the run's numerics": numerics}
    engine = replace(numerics, trainer=numerics.rollout)
    return {"ours, as the run's trainer": numerics, "ours, as the run's engine": engine}


def scored(
    path: Path, numerics: Mapping[str, NumericsConfig], rows: Sequence[DumpRow], samplings: Sequence[Sampling]
) -> tuple[dict[str, dict[int, Tensor]], str]:
    """float64 [T] by name of the numerics and by row, of exact mode; and why it is not all of them, in words.

    Another architecture, sizes that do not fit a spec, and a machine on which a token depends on its batch are reasons.
    """
    found: dict[str, dict[int, Tensor]] = {}
    config, first = TrainerSection(micro_batch_tokens=_MICRO_BATCH), next(iter(numerics.values()))
    try:
        check_stored(path, read_model(path))
        with one_rank(config, first) as layout:
            from fp8rl.trainer.scorer import Scorer

            longest = max(len(row.tokens) for row in rows)
            scorer = Scorer(path, config, first, layout, max_sequence_length=longest)
            for name, each in numerics.items():
                scorer.set_numerics(each)
                found[name] = _of_all(scorer.score, rows, samplings)
    except UserError as error:
        return found, str(error)
    return found, ""


@contextmanager
def exported(model: Path, checkpoint: Path | None, numerics: NumericsConfig | None) -> Iterator[Path]:
    """Write the weights of a checkpoint as a Hugging Face directory, for a block; without one, take the model's own."""
    if checkpoint is None or numerics is None:
        yield model
        return
    with TemporaryDirectory(prefix="fp8rl-certify-") as folder:
        with one_trainer(model, numerics, micro_batch_tokens=_MICRO_BATCH, longest=1) as trainer:
            trainer.load(checkpoint)
            trainer.export_hf(Path(folder) / "model")
        yield Path(folder) / "model"


def _of_all(
    score: Callable[[TokenBatch], tuple[list[int], Tensor]], rows: Sequence[DumpRow], samplings: Sequence[Sampling]
) -> dict[int, Tensor]:
    """Score the rows of one sampling together, right-padded; float64 [T] of each answer, by row."""
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
            batch = TokenBatch(padded, lengths, answers, temperature=sampling.divisor)
            order, logprobs = score(replace(batch, truncation=sampling.truncation))
            for row, said in zip(order, logprobs, strict=True):
                number = some[row]
                answer = slice(rows[number].prompt_length, len(rows[number].tokens))
                found[number] = said[answer].double().cpu()
    return found
