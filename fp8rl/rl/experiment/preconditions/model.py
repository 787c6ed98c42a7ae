"""Checks the model directories of the policy and of its teacher, which must have the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fp8rl import models
from fp8rl.models import Model, ModelSizes, load_architecture
from fp8rl.models.checkpoint.reading import check_stored
from fp8rl.models.shape import Shape
from fp8rl.numerics.core.errors import raise_first, user_error
from fp8rl.numerics.core.reading import check_regular, read_json
from fp8rl.numerics.core.section import RELATIVE
from fp8rl.rl.algorithms.base import AlgorithmConfig, UnwrittenMethodError
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.tokenizer import load_tokenizer
from fp8rl.rollout.engine.server.client import SCORED_SHORT_OF
from fp8rl.trainer.config import RateSection
from fp8rl.trainer.megatron.model_checks import check_engine_layout, split_refusals

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = "generation_config.json"
TEACHER = "teacher.path"


def read_model(path: Path, key: str = "model.path") -> Model:
    """Read config.json of the Hugging Face directory `path`. key: the name of the directory in messages. Raises
    UserError: the directory or its config is missing, broken, quantized or of an unknown architecture."""
    if not path.is_dir():
        remedy = f"Correct the path; {RELATIVE}. `fp8rl init DIR` writes a small model, DIR/model."
        raise user_error(key, str(path), "an existing Hugging Face model directory", remedy)
    check_regular(path, key)
    if (path / GENERATION).is_file():  # which an engine reads
        read_json(path / GENERATION, key, "a JSON object")
    return models.read_model(path, key)


def check_architecture(model: Model, experiment: Experiment) -> None:
    """Raise `UserError` if the architecture of a user's file is not the model's. It may be a teacher's instead."""
    file = experiment.model.architecture
    if file is not None and experiment.teacher is None and (users := load_architecture(file)) is not model.architecture:
        found, expected = f"{file} with {users.name}", f"the architecture of model.path, {model.architecture.name}"
        raise user_error("model.architecture", found, expected, "Remove model.architecture, or name another model.")


def check_teacher(experiment: Experiment, policy: ModelSizes, tokenizer: PreTrainedTokenizerBase) -> Shape | None:
    """Check that the teacher, if any, can be served and can score answers; return its shape. Raises UserError: its
    directory or layout is wrong, its vocabulary is another, or its context is too short for the longest answer."""
    if experiment.teacher is None:
        return None
    path = experiment.teacher.directory
    model = read_model(path, TEACHER)
    _check_vocabulary(path, model.sizes, policy, tokenizer, experiment.model.path)
    check_teacher_layout(experiment, model.shape)
    check_stored(path, model, TEACHER)
    return model.shape


def check_teacher_layout(experiment: Experiment, shape: Shape) -> None:
    """Raise `UserError` if a teacher of this shape does not divide over its engine's ranks or into the run's slices of
    products, or has no room for the longest answer."""
    teacher, asked = experiment.teacher, experiment.rollout.context_length
    assert teacher is not None
    numerics = teacher.numerics(experiment)
    check_engine_layout(shape, teacher.tp, numerics.rollout_spec, numerics.mode, "teacher.tp")
    slices, key = numerics.k_splits, "max(trainer.tp, rollout.tp)"
    raise_first(split_refusals(shape, slices, numerics.rollout_spec, key, copies=slices))
    length = teacher.engine(experiment.rollout).context_length
    key, least, most = "teacher.context_length", asked + SCORED_SHORT_OF, shape.sizes.max_positions
    if length < least:
        kept = f"rollout.context_length = {asked}, and {SCORED_SHORT_OF} tokens that an engine keeps free"
        remedy = "Remove teacher.context_length, or lower rollout.context_length."
        raise user_error(key, length, f"at least {least}: {kept}", remedy)
    if length > most:
        shorter = most - SCORED_SHORT_OF
        remedy = f"Lower rollout.context_length to at most {shorter}, and remove teacher.context_length."
        raise user_error(key, length, f"at most {most}, the {shape.sizes.limit} of {teacher.path}", remedy)
    if teacher.max_total_tokens < length:
        expected = f"at least the context length of its engines, {length}"
        remedy = "Raise teacher.max_total_tokens or lower rollout.context_length."
        raise user_error("teacher.max_total_tokens", teacher.max_total_tokens, expected, remedy)


def _check_vocabulary(
    path: Path, sizes: ModelSizes, policy: ModelSizes, tokenizer: PreTrainedTokenizerBase, policy_path: str
) -> None:
    if sizes.vocab_size != policy.vocab_size:
        found = f"{path} with vocab_size = {sizes.vocab_size}"
        expected = f"{policy.vocab_size}, as in model.path = {policy_path}"
    else:
        ours, theirs = tokenizer.get_vocab(), load_tokenizer(path, TEACHER).get_vocab()
        if ours == theirs:
            return
        token = min((t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)), key=repr)
        found = f"{path} with a tokenizer that {_knows(token, theirs)}"
        expected = f"the tokenizer of model.path = {policy_path}, which {_knows(token, ours)}"
    remedy = "Give teacher.path a model of the same family: a teacher scores the policy's token ids."
    raise user_error(TEACHER, found=found, expected=expected, remedy=remedy)


def _knows(token: str, vocabulary: dict[str, int]) -> str:
    return f"has {token!r} as token {vocabulary[token]}" if token in vocabulary else f"lacks the token {token!r}"


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Raise `UserError` if a user's algorithm has no method that returns advantages, or misspells its name."""
    kind, methods = type(algorithm), ("training_fields", "token_advantages", "trajectory_advantages")
    if isinstance(algorithm, PolicyGradient) and all(
        getattr(kind, method) is getattr(PolicyGradient, method) for method in methods
    ):
        error = UnwrittenMethodError(algorithm, methods[-1])
        remedy = "Write the method with this signature; docs/api.md has all signatures."
        raise user_error("algorithm.name", error.found, error.expected, remedy) from error


def unused_rates(experiment: Experiment) -> Iterator[str]:
    """Yield a remark on each learning-rate key that has no effect."""
    critic = getattr(experiment.algorithm, "critic", None)
    for key, rate in (("trainer", experiment.trainer), ("algorithm.critic", critic)):
        if not isinstance(rate, RateSection) or rate.decay != "constant":
            continue
        for name in ("min_lr", "decay_steps"):
            if (value := getattr(rate, name)) != RateSection.model_fields[name].default:
                yield f"{key}.{name}={value} changes nothing with {key}.decay=constant; set it to linear or cosine"
