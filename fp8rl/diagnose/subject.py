"""Reads the argument of a command: the folder of a run, a capsule, or the directory of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fp8rl.models import load_architecture
from fp8rl.models.architecture import Model, check_scope
from fp8rl.models.checkpoint.peft import read_config
from fp8rl.models.checkpoint.reading import check_stored
from fp8rl.models.hub import model_directory
from fp8rl.numerics.config import Mode, NumericsConfig
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.reading import check_path, read_json
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment import Experiment, read_resolved, with_keys
from fp8rl.rl.experiment.loading import compose_experiment
from fp8rl.rl.experiment.preconditions import read_model
from fp8rl.rl.experiment.preconditions.tokenizer import check_chat_template, load_tokenizer
from fp8rl.rl.guard.capsule import Capsule, read_capsule
from fp8rl.rl.guard.guard import GateState
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.engines.serving import engine_adapter
from fp8rl.rollout.tasks.tool_calls import parsers


@dataclass(frozen=True)
class Subject:
    """A run, a capsule or a model, with the weights and numerics to compute it."""

    name: str
    path: Path
    experiment: Experiment
    """The spec. Its model and adapter are the weights to start from."""
    numerics: NumericsConfig
    """The numerics that were in force."""
    checkpoint: Path | None = None
    """A checkpoint whose weights replace the weights of the model's directory."""
    capsule: Capsule | None = None
    """The capsule whose tokens are compared; None: tokens must first be sampled."""
    tool_parser: str | None = None
    """The format in which a served model calls tools."""

    @property
    def base_name(self) -> str | None:
        """The name by which clients ask for a served model without its adapter."""
        return None if self.experiment.adapter is None else f"{self.name}-base"

    def with_tools(self, tool_parser: str) -> Subject:
        """Let the model call tools in this format. Raises UserError: SGLang has no such format."""
        if tool_parser not in (known := parsers()):
            expected = f"one of {', '.join(known)}"
            raise user_error("--tool-parser", found=tool_parser, expected=expected, remedy="Correct it.")
        return replace(self, tool_parser=tool_parser)


_RUN_OR_CAPSULE = "RUN|CAPSULE"


def newest_run(folder: Path) -> Path:
    """Return the run of a folder that made the latest step. Raises UserError: no run in the folder has made a step."""
    found = sorted(folder.glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    if not found:
        remedy = "Name the directory of a run or of a capsule."
        raise user_error(_RUN_OR_CAPSULE, str(folder), "a folder with a run that made a step", remedy)
    return found[-1].parent


def read_subject(path: Path, model: Path | None = None) -> Subject:
    """Read a run's folder, with its newest weights, or a capsule. model: weights in place of a capsule's own. Raises
    UserError: `path` is neither a run nor a capsule, has no weights, or is damaged."""
    check_path(path, _RUN_OR_CAPSULE)
    path = Path(path).absolute()
    if (path / "capsule.json").is_file():
        capsule = read_capsule(path)
        load_architecture_of(capsule.experiment)
        if model is not None:
            check_path(model, "--model")
        if (weights := model or capsule.weights) is None:
            expected = f"the weights of version {capsule.scored.version} as a Hugging Face directory"
            remedy = "Give --model DIR, or set guard.capsule_weights=true in runs to come."
            raise user_error("--model", "nothing, for a capsule without weights", expected, remedy)
        experiment = capsule.beginning(weights)
        name = f"{experiment.run.name} {capsule.path.name}"
        return Subject(name, capsule.path, experiment, capsule.numerics, capsule=capsule)
    if model is not None:
        expected = "none beside a run, which has its own weights"
        raise user_error("--model", found=str(model), expected=expected, remedy="Leave it out.")
    expected = "the directory of a run or of a capsule"
    remedy = "Give for example runs/demo, or runs/demo/capsules/step_7."
    run, experiment = open_run(path, key=_RUN_OR_CAPSULE, found=str(path), expected=expected, remedy=remedy)
    step = max(run.checkpoint_steps(), default=None)
    trained = _trained(run, experiment) if step is None else experiment
    if trained is None:
        found = f"{run.path} without model/, adapter/ or a checkpoint"
        remedy = "Let the run reach its first checkpoint, or name one of its capsules."
        raise user_error(_RUN_OR_CAPSULE, found, "weights to compare", remedy)
    checkpoint = None if step is None else run.checkpoint(step)
    return Subject(run.name, run.path, trained, last_numerics(run, experiment), checkpoint)


def open_run(path: Path, *, key: str, found: str, expected: str, remedy: str) -> tuple[RunDir, Experiment]:
    """Open a run's folder to compute with it: read its resolved spec, and import the architecture that the spec names.

    Raises UserError, with the given words, if there is no run.
    """
    run = RunDir(path.absolute())
    if not run.experiment.is_file():
        raise user_error(key, found=found, expected=expected, remedy=remedy)
    experiment = read_resolved(run.experiment)
    load_architecture_of(experiment)
    return run, experiment


def load_architecture_of(experiment: Experiment) -> None:
    """Import the file of `model.architecture`, if a run's spec names a file: whatever computes with the model needs it.
    Raises UserError: the file cannot be imported, or the scope names a module kind that no architecture has."""
    if experiment.model.architecture is not None:
        load_architecture(experiment.model.architecture)
    check_scope(experiment.numerics_config().spec)


def last_numerics(run: RunDir, experiment: Experiment) -> NumericsConfig:
    """Return the numerics of a run since its last checkpoint. A gate may have changed them to BF16."""
    state = GateState.of_checkpoint(run, max(run.checkpoint_steps(), default=None))
    return state.numerics(experiment.numerics_config())


LONGEST = 32768
"""The longest sequence, in tokens, that an engine takes for a model directory, if the model has as many positions."""
_KEY = "RUN|MODEL"


def read_served(path: Path, mode: Mode, preset: str, architecture: str | None = None) -> Subject:
    """Read a model that is to be served: a run's trained model, with the run's numerics; or a model directory, with
    this mode and preset. The architecture of a model directory may be in a user's file. Raises UserError: `path` is
    neither a run nor a model directory, or the run has no trained model yet."""
    check_path(path, _KEY)
    run = RunDir(path.absolute())
    if not run.experiment.is_file():
        path = model_given(path, architecture, _KEY)
        _refuse_converted(path)
        side = "fp8" if QuantSpec.preset(preset).quantized else "bf16"
        values = {
            "model": {"path": str(path.absolute()), "architecture": architecture},
            "numerics": {"mode": mode, "preset": preset, "trainer": side, "rollout": side},
            "data": {"train": "-"},
            "eval": {"problems": 0},
            "rollout": {"context_length": min(check_model(path).sizes.max_positions, LONGEST)},
        }
        experiment = compose_experiment(values, [])
        return Subject(run.name, path, experiment, experiment.numerics_config())
    experiment = read_resolved(run.experiment)
    load_architecture_of(experiment)
    trained, beside = _trained(run, experiment), engine_adapter(experiment) is not None
    if trained is None or (trained.adapter is not None) is not beside:  # an adapter that was to be merged
        found = f"{path}, a run without {'adapter' if beside else 'model'}/"
        remedy = f"Finish it with fp8rl train {run.experiment} --resume, or give the directory of a model."
        raise user_error(_KEY, found, "a finished run", remedy)
    definition = check_model(trained.model.directory)
    if trained.adapter is not None:
        read_config(run.adapter, definition, _KEY)
    harness = experiment.environment.harness
    parser = None if harness is None else harness.tool_parser
    return Subject(run.name, run.path, trained, last_numerics(run, experiment), tool_parser=parser)


def _trained(run: RunDir, experiment: Experiment) -> Experiment | None:
    """Return an experiment whose model is the one that the run wrote at its end; None: no model yet."""
    if engine_adapter(experiment) is None and run.model.is_dir():
        return with_keys(experiment, {"model": experiment.model.at(run.model), "adapter": None})
    if experiment.adapter is None or not run.adapter.is_dir():
        return None
    return with_keys(experiment, {"adapter.start": str(run.adapter)})


def model_given(model: Path, architecture: str | Path | None, key: str) -> Path:
    """Load the user's file with a model's architecture, if any; return the model's directory, also for a hub's name."""
    check_path(model, key)
    if architecture is not None:
        load_architecture(str(architecture), "--architecture")
    return model_directory(str(model), None, key)


def check_model(path: Path) -> Model:
    """Check the files of a model directory, and return the model. Raises UserError: a file is missing or wrong."""
    definition = read_model(path, _KEY)
    tokenizer = load_tokenizer(path, _KEY)
    if tokenizer.chat_template:
        check_chat_template(tokenizer, path, _KEY)
    check_stored(path, definition, _KEY)
    return definition


def _refuse_converted(model: Path) -> None:
    """Refuse a model in FP8: `fp8rl convert` writes such a model for other servers."""
    try:
        quantized = "quantization_config" in read_json(model / "config.json", _KEY, "a Hugging Face config.json")
    except UserError:
        return  # what else is wrong is said by those who read it
    if quantized:
        expected = "a model in BF16, which this command quantizes itself"
        remedy = "Give the directory that it was converted from, or what `fp8rl convert MODEL OUT --preset bf16` makes "
        remedy += "of it. A server of your own takes it as it is: python -m sglang.launch_server --model-path ..."
        raise user_error(_KEY, f"{model}, whose weights are quantized", expected, remedy)
