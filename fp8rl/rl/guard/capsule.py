"""Capsules: the worst sequences of a step, with everything that is needed to score them again in another process.

A capsule is a directory: `capsule.json` (why, and in which numerics), `tensors.safetensors` (tokens, and both sides'
results), `spec.yaml` (the resolved experiment), `manifest.json` (digests of the served weights), `weights/` (the
trainer's weights in Hugging Face format, unless the experiment leaves them out), `SHA256SUMS` (over all other files).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter
from safetensors.torch import save_file

from fp8rl.models.adapters import AdapterSection
from fp8rl.models.checkpoint.writing import open_tensors
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.files import file_sha256, new_directory
from fp8rl.numerics.core.reading import check_path, parsed, read_text
from fp8rl.numerics.core.section import validated
from fp8rl.numerics.sampling import Truncation
from fp8rl.rl.experiment import Experiment, read_resolved, with_keys
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.kept_tokens import KeptTokenPool
from fp8rl.weight_sync.manifest import Manifest

if TYPE_CHECKING:
    from fp8rl.trainer.actor import TrainerGroup

FORMAT = 1
_ABOUT = "capsule.json"
_TENSORS = "tensors.safetensors"
_EXPERIMENT = "spec.yaml"
_MANIFEST = "manifest.json"
_WEIGHTS = "weights"
_ADAPTER = "adapter"
_SUMS = "SHA256SUMS"
_COPY = "The capsule is damaged: copy it again from where the run wrote it."


@dataclasses.dataclass(frozen=True)
class Capsule:
    """The contents of a capsule, read and checked."""

    path: Path
    about: About
    numerics: NumericsConfig
    experiment: Experiment
    manifest: Manifest
    scored: ScoredBatch
    """The scores of `about.rows` in the step's last pass."""

    @property
    def weights(self) -> Path | None:
        """The weights that scored the sequences, if they were kept."""
        path = self.path / _WEIGHTS
        return path if path.is_dir() else None

    def beginning(self, weights: Path) -> Experiment:
        """Return the capsule's experiment, changed to start from the weights that `export_weights` has written."""
        changed: dict[str, Any] = {"adapter": None}
        if self.experiment.adapter is not None and self.experiment.adapter.mode == "separate":
            changed = {"adapter.start": str(weights / _ADAPTER)}
        return with_keys(self.experiment, {"model": self.experiment.model.at(weights), **changed})


class About(BaseModel):
    """Contents of `capsule.json`, without its format."""

    model_config = ConfigDict(strict=True, frozen=True)

    step: Annotated[int, Field(ge=0, lt=2**63)]
    why: list[str]
    """Sentences of the gates and faults for which the capsule was written."""
    numerics: dict[str, Any]
    weight_version: Annotated[int, Field(ge=0, lt=2**63)]
    temperature: float
    replay: bool
    truncation: dict[str, Any] = {}
    rows: list[int]
    """Rows of the step's batch that the capsule keeps: first the rows that a fault came from, then the worst."""
    tis_cap: Annotated[FiniteFloat, Field(ge=1.0)]
    metrics: dict[str, FiniteFloat]
    """`mismatch/...` and `drift/...` over `rows`."""
    wrong: list[str] | None = None
    """Tensors whose digest in an engine differed from the manifest when the capsule was written; None: not known."""


_TRUNCATION = TypeAdapter(Truncation)


def export_weights(trainer: TrainerGroup, adapter: AdapterSection | None, path: Path) -> None:
    """Write the model that scores a batch to the new directory `path`, and separate adapters to a directory in it."""
    trainer.export_hf(path)
    if adapter is not None and adapter.mode == "separate":
        trainer.export_adapter(path / _ADAPTER, path)


def write_capsule(
    path: Path,
    scored: ScoredBatch,
    export: Callable[[Path], object] | None,
    *,
    step: int,
    why: Sequence[str],
    rows: Sequence[int],
    numerics: NumericsConfig,
    experiment: Path,
    manifest: Path,
    held: Sequence[Mapping[str, str]] = (),
) -> None:
    """Write the capsule of a step to `path`; it appears whole or not at all.

    export: writes the weights that scored the batch to a new directory; None leaves them out. why: sentences of gates
    and faults. rows: rows of the batch, first the faulty ones, then the worst. experiment, manifest: the files
    with the run's resolved experiment and with the digests of the served weights. held: for each engine that answers,
    the digests that it reports now.
    """
    chosen, wrong = scored.select(rows), None
    if held:
        served = Manifest(**json.loads(manifest.read_text()))
        wrong = sorted(set().union(*map(served.differences, held)))
    about = About(
        step=step,
        why=list(why),
        numerics=numerics.to_dict(),
        weight_version=scored.version,
        temperature=chosen.batch.temperature,
        replay=chosen.batch.replay,
        truncation=dataclasses.asdict(chosen.batch.truncation) if chosen.batch.truncation.cuts else {},
        rows=list(rows),
        tis_cap=scored.tis_cap,
        metrics=chosen.metrics() | chosen.drift(),
        wrong=wrong,
    )
    with new_directory(path) as partial:
        written = {"format": FORMAT} | about.model_dump(exclude_defaults=True)
        (partial / _ABOUT).write_text(json.dumps(written, indent=1, allow_nan=False) + "\n")
        save_file(_tensors(chosen), partial / _TENSORS)
        shutil.copy(manifest, partial / _MANIFEST)
        shutil.copy(experiment, partial / _EXPERIMENT)
        if export is not None:
            export(partial / _WEIGHTS)
        files = sorted(file for file in partial.rglob("*") if file.is_file())
        sums = [f"{file_sha256(file)}  {file.relative_to(partial)}\n" for file in files]
        (partial / _SUMS).write_text("".join(sums))


def read_capsule(path: Path) -> Capsule:
    """Read a capsule, and check its files against their sums. Raises UserError: `path` is no capsule or one of another
    format, or a file is missing or damaged."""
    check_path(path, "capsule")
    path = Path(path)
    if not (path / _SUMS).is_file():
        expected = f"a capsule, a directory with {_SUMS}"
        raise user_error("capsule", str(path), expected, "Name one of a run's capsules/step_N directories.")
    listed = read_text(path / _SUMS, "capsule", "the SHA-256 of every file", _COPY).splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in listed)}
    for file in path.rglob("*"):
        if not file.is_dir() and file.name != _SUMS:
            sums.setdefault(str(file.relative_to(path)), "of no file of this name")
    for name, expected in sums.items():
        file = path / name
        found = file_sha256(file) if file.is_file() else "no such file"
        if found != expected:
            raise user_error(f"capsule file {file}", found, f"SHA-256 {expected}, as {_SUMS} says", _COPY)
    manifest = parsed(path / _MANIFEST, "capsule", lambda values: Manifest(**values), _COPY)
    experiment = read_resolved(path / _EXPERIMENT)
    return parsed(path / _ABOUT, "capsule", lambda about: _capsule(path, about, experiment, manifest), _COPY)


def _capsule(path: Path, values: dict[str, Any], experiment: Experiment, manifest: Manifest) -> Capsule:
    if values["format"] != FORMAT:
        remedy = "Explain the capsule with the version of fp8rl that wrote it."
        raise user_error(f"{path / _ABOUT}: format", values["format"], str(FORMAT), remedy)
    about = validated(About.model_validate, values, str(path / _ABOUT), _COPY)
    numerics = NumericsConfig.from_dict(about.numerics)
    with open_tensors(path / _TENSORS, "capsule") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    return Capsule(path, about, numerics, experiment, manifest, _scored(tensors, about))


def _tensors(scored: ScoredBatch) -> dict[str, torch.Tensor]:
    batch = scored.batch
    tensors = {
        "rollout_routes": batch.routes,
        "train_routes": scored.routes,
        "seeds": batch.seeds,
        "train_draws": scored.draws,
    }
    if batch.supports is not None:
        tensors |= {"supports.at": batch.supports.at, "supports.pool": batch.supports.pool}
    return {name: value for name, value in tensors.items() if value is not None} | {
        "tokens": batch.tokens,
        "lengths": batch.lengths,
        "loss_mask": batch.loss_mask,
        "weight_versions": scored.versions,
        "train_logprobs": scored.logprobs,
        **{f"fields.{name}": value for name, value in batch.fields.items()},
    }


def _scored(tensors: dict[str, torch.Tensor], about: About) -> ScoredBatch:
    batch = TokenBatch(
        tokens=tensors["tokens"],
        lengths=tensors["lengths"],
        loss_mask=tensors["loss_mask"],
        temperature=about.temperature,
        fields={name.removeprefix("fields."): value for name, value in tensors.items() if name.startswith("fields.")},
        routes=tensors.get("rollout_routes"),
        replay=about.replay,
        seeds=tensors.get("seeds"),
        truncation=_TRUNCATION.validate_python(about.truncation),
        supports=KeptTokenPool(tensors["supports.at"], tensors["supports.pool"]) if "supports.at" in tensors else None,
    )
    return ScoredBatch(
        batch=batch,
        versions=tensors["weight_versions"],
        version=about.weight_version,
        logprobs=tensors["train_logprobs"],
        routes=tensors.get("train_routes"),
        draws=tensors.get("train_draws"),
        tis_cap=about.tis_cap,
    )


def remove_superfluous(run: RunDir, keep: int) -> None:
    """Keep `keep` capsules: the first of the run, which most often shows the cause of the others, and the newest."""
    for step in run.capsule_steps()[1 : 1 - keep]:
        shutil.rmtree(run.capsule(step), ignore_errors=True)
