"""Reads a dump of any kind: rows of our schema, a run of fp8rl, a dump of slime, or a batch of verl."""

from __future__ import annotations

import dataclasses
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8rl.diagnose.subject import open_run
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.reading import LARGEST, check_file, check_path, parse_json, read_bytes, whole_json_lines
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.guard.guard import GateState
from fp8rl.rl.record.history import read_events
from fp8rl.rl.record.rollouts import ROLLOUT, RolloutRecord
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.trainer.checkpoint.files import read_about
from fp8rl_certify.dump import slime_verl
from fp8rl_certify.dump.rows import Dump, Sampling, whole


def read_dump(path: Path, model: Path | None = None) -> Dump:
    """Read the rows of a file, or of a run's folder. model: the directory of the weights, if the user gives it.

    Raises:
        UserError: the dump is of no known kind, is damaged, or has a row that does not fit. The message names the row.
    """
    check_path(path, "DUMP")
    if not path.exists():
        raise user_error("DUMP", found=str(path), expected="a file, or the folder of a run", remedy="Correct the path.")
    if path.is_dir() or is_rollouts(path):
        return read_run(path, model)
    check_file(path, "DUMP", "a dump")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _check_size(sum(each.file_size for each in archive.infolist()), path)
        match path.suffix:
            case ".pt" | ".pth":
                return slime_verl.read_slime(path)
            case ".safetensors" | ".npz":
                return slime_verl.read_verl(path)
            case ".parquet":
                return whole(path, "rows in parquet", _parquet(path))
            case ".pkl" | ".pickle" | ".dp":
                raise _pickle(path)
    except UserError:
        raise
    except Exception as error:  # what libraries raise at a file that is cut, flipped or forged is no short list
        found = f"{path}: {type(error).__name__}: {error}".splitlines()[0]
        raise user_error("DUMP", found=found, expected="a whole file", remedy="Write it again.") from None
    data = read_bytes(path, "DUMP", "a dump")
    if data[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise _pickle(path)
    return whole(path, "rows in JSON", _json_lines(path, data))


def _check_size(size: int, path: Path) -> None:
    """Raise `UserError` for a file that takes too much memory when it is unpacked."""
    if size > max(LARGEST, path.stat().st_size):
        found = f"{path}, {size:,} bytes when it is unpacked"
        raise user_error("DUMP", found=found, expected=f"at most {LARGEST:,}", remedy="Write fewer rows to a file.")


def _json_lines(path: Path, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            values = parse_json(line, float)
        except ValueError as error:
            found = f"{line[:60].decode('utf-8', 'replace')} ({error})"
            raise _no_object(path, number, found) from None
        if not isinstance(values, dict):
            raise _no_object(path, number, f"a {type(values).__name__}")
        if {"input", "output"} <= values.keys() and "tokens" not in values:
            raise _texts_alone(f"line {number} of {path}", values)
        yield f"line {number}", values


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        about = pyarrow.parquet.read_metadata(path)
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        counts = (each.column(number).num_values for each in groups for number in range(each.num_columns))
        _check_size(8 * sum(counts), path)
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise user_error(
            "DUMP", found=f"{path}: {error}", expected="a parquet file", remedy="Write it again."
        ) from None
    for number, values in enumerate(table.to_pylist(), start=1):
        yield f"row {number}", values


def _no_object(path: Path, number: int, found: str) -> UserError:
    expected = "a JSON object with tokens, prompt_length and logprobs"
    remedy = "Write one object a line; docs/certify.md has the schema."
    return user_error(f"line {number} of {path}", found=found, expected=expected, remedy=remedy)


def _texts_alone(where: str, values: Mapping[str, Any]) -> UserError:
    """Return the error for a file of verl's `trainer.rollout_data_dir`, which has only texts."""
    return user_error(
        where,
        found=f"texts without token ids ({', '.join(list(values)[:6])}), as verl writes to trainer.rollout_data_dir",
        expected="token ids and log-probabilities",
        remedy="Have the trainer save its batch as safetensors; docs/certify.md has the line.",
    )


def _pickle(path: Path) -> UserError:
    """Return the error for a pickle, such as verl's `DataProto.save_to_disk` writes."""
    return user_error(
        "DUMP",
        found=f"{path}, a pickle, which may run any code when it is opened",
        expected="JSON lines, safetensors, npz, parquet, or what torch.save wrote of plain values",
        remedy="Have the trainer save its batch as safetensors; docs/certify.md has the line.",
    )


# A run of ours: the answers of a step, with the weights, the temperature and the numerics that they came from.

_KEY = b'"rollout_logprobs"'


def is_rollouts(path: Path) -> bool:
    """Return whether a file is in the `rollouts/` of a run."""
    return path.is_file() and path.suffix == ".jsonl" and _KEY in read_bytes(path, "DUMP", "a dump").split(b"\n", 1)[0]


def read_run(path: Path, model: Path | None = None) -> Dump:
    """Read the answers of one step: the file's step, or the run's newest step whose weights still exist.

    Tokens of another weight version than most of the step's tokens are left out. model: the directory of the step's
    weights; the run's own weights are then not searched.

    Raises:
        UserError: there is no such run or step, or its weights no longer exist.
    """
    folder = path.absolute() if path.is_dir() else path.absolute().parents[1]
    run, experiment = open_run(
        folder,
        key="DUMP",
        found=f"{path}, and no spec.yaml in {folder}",
        expected="a run, with its spec.yaml",
        remedy="Give the folder of a run, such as runs/demo, or a file in its rollouts/.",
    )
    if experiment.adapter is not None:
        raise user_error(
            "DUMP",
            found=f"{run.path}, which trains adapters",
            expected="a run that trains the weights themselves",
            remedy="Use fp8rl explain on one of its capsules.",
        )
    files = [path] if path.is_file() else [run.rollouts(step) for step in reversed(run.rollout_steps())]
    missing: UserError | None = None
    for file in files:
        records = whole_json_lines(file, "DUMP", ROLLOUT.validate_python)
        versions = Counter(version for record in records for version in record.weight_versions)
        version = versions.most_common(1)[0][0] if versions else 0  # of most of the tokens
        try:
            found, step = (model, None) if model else _weights(run, experiment, version)
        except UserError as error:
            missing = missing or error
            continue
        number = float("".join(filter(str.isdigit, file.stem)) or "inf")
        fell = any(event.action == "bf16_both" and event.step < number for event in read_events(run.events))
        numerics = GateState(bf16=fell).numerics(experiment.numerics_config())
        sampling = Sampling(experiment.rollout.temperature, experiment.rollout.truncation)
        kind = f"{file.stem.replace('_', ' ')} of the run {run.name}"
        rows = whole(file, kind, _run_rows(records, version), sampling)
        checkpoint = None if step is None else run.checkpoint(step)
        return dataclasses.replace(rows, unread=[], model=found, checkpoint=checkpoint, numerics=numerics)
    raise missing or user_error(
        "DUMP",
        found=f"{run.path} without rollouts",
        expected="at least one step",
        remedy="Let the run complete a step.",
    )


def _weights(run: RunDir, experiment: Experiment, version: int) -> tuple[Path, int | None]:
    """Return the model's directory, and the step of the checkpoint whose weights replace the directory's, if any."""
    if version == 0:
        return experiment.model.directory, None
    # Steps with several updates, or without one, make versions that are no numbers of steps.
    steps = {read_about(run.checkpoint(step)).step: step for step in run.checkpoint_steps()}
    if version in steps:
        return experiment.model.directory, steps[version]
    kept = ", ".join(map(str, steps)) or "none"
    raise user_error(
        "DUMP",
        found=f"answers of weight version {version}, and checkpoints of versions {kept}",
        expected="the weights that sampled them",
        remedy="Give them with --model DIR, or give rollouts/step_1.jsonl, whose weights are those that the run began "
        "with, or the step after a checkpoint.",
    )


def _run_rows(records: list[RolloutRecord], version: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, record in enumerate(records, start=1):
        length = len(record.token_ids)
        told = {place for begin, end in record.told for place in range(begin, end)}
        sampled = [place for place in range(length) if place not in told]
        versions: list[int | None] = [None] * length
        values: dict[str, list[float | None]] = {"logprobs": [None] * length, "trainer_logprobs": [None] * length}
        for index, place in enumerate(sampled):
            versions[place] = record.weight_versions[index]
            values["logprobs"][place] = record.rollout_logprobs[index]
            values["trainer_logprobs"][place] = record.train_logprobs[index]
        if length:
            yield (
                f"line {number}",
                {
                    "tokens": record.prompt_ids + record.token_ids,
                    "prompt_length": len(record.prompt_ids),
                    "mask": [each == version for each in versions],
                    "version": version,
                    **values,
                },
            )
