"""The model directory: an architecture that is known, and a layout that it splits into."""

from __future__ import annotations

from pathlib import Path

from fp8rl import models
from fp8rl.models import Model, ModelSizes, load_architecture
from fp8rl.numerics.errors import user_error
from fp8rl.numerics.io.reading import check_regular, read_json
from fp8rl.numerics.io.section import RELATIVE
from fp8rl.numerics.time_limit import time_limit
from fp8rl.rl.algorithms import ALGORITHMS
from fp8rl.rl.algorithms.rehearsal import rehearse
from fp8rl.rl.experiment import Experiment
from fp8rl.trainer.megatron.model_checks import check_engine_layout, check_layout, check_router_bias, check_wires

GENERATION = "generation_config.json"


def read_model(path: Path, key: str = "model.path") -> Model:
    """Read config.json of the Hugging Face directory `path`; messages speak of it as `key`.

    Raises:
        UserError: directory or config are missing, broken, quantized or of another architecture.
    """
    if not path.is_dir():
        raise user_error(
            key,
            found=str(path),
            expected="an existing Hugging Face model directory",
            remedy=f"Correct the path; {RELATIVE}. `python -m examples.tiny_model --out DIR` writes a small model.",
        )
    check_regular(path, key)
    if (path / GENERATION).is_file():  # which an engine reads
        read_json(path / GENERATION, key, "a JSON object")
    return models.read_model(path, key)


def check_architecture(model: Model, experiment: Experiment) -> None:
    """Whether the architecture of a user's file is the model's; a teacher may have it, too. Raises UserError: it is
    not."""
    file = experiment.model.architecture
    if file is not None and experiment.teacher is None and (own := load_architecture(file)) is not model.architecture:
        raise user_error(
            "model.architecture",
            found=f"{file} with {own.name}",
            expected=f"that of model.path, {model.architecture.name}",
            remedy="Remove model.architecture, or name another model.",
        )


def check_model_layout(sizes: ModelSizes, experiment: Experiment) -> None:
    """Whether the model splits into tp, pp, ep and dp parts of whole quantization blocks.

    Raises:
        UserError: no.
    """
    if experiment.trainer.pp > 1 and experiment.numerics.router_replay != "off":
        raise user_error(
            "trainer.pp",
            found=f"{experiment.trainer.pp} with numerics.router_replay={experiment.numerics.router_replay}",
            expected="1: a stage sees the routers of its own layers alone",
            remedy="Set trainer.pp=1, or numerics.router_replay=off.",
        )
    if experiment.numerics.router_replay != "off" and not sizes.moe:
        raise user_error(
            "numerics.router_replay",
            found=experiment.numerics.router_replay,
            expected="off for a dense model, which has no experts",
            remedy="Set numerics.router_replay=off, or choose a mixture of experts.",
        )
    numerics = experiment.numerics_config()
    check_layout(sizes, experiment.trainer, numerics.blocks_spec)
    check_wires(sizes, experiment.trainer, numerics.trainer_spec)
    check_router_bias(sizes, experiment.trainer)
    check_engine_layout(sizes, experiment.rollout.tp, numerics.blocks_spec)


# An algorithm of a user's: a step of it is taken over made-up answers before a run starts.

STEP_SECONDS = 20.0
"""Seconds of patience for what takes a hundredth of one."""


def check_algorithm(experiment: Experiment) -> None:
    """Whether the algorithm comes through a step; ours do, as tests hold.

    Raises:
        UserError: a user's does not.
    """
    algorithm = experiment.algorithm
    if type(algorithm) in ALGORITHMS.values():
        return
    try:
        with time_limit(STEP_SECONDS):
            rehearse(algorithm, min(experiment.rollout.group_size, 3))
    except Exception as error:  # whatever a user's code may raise
        raise user_error(
            "algorithm.name",
            found=algorithm.name,
            expected=f"an algorithm that a step can be taken with; this one ends in {type(error).__name__}: {error}",
            remedy="Correct it; docs/extending.md says what an algorithm is.",
        ) from error
