"""The teacher's directory: a model that engines can serve, which knows the policy's tokens by the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp8rl.models import ModelSizes
from fp8rl.models.shape import Shape
from fp8rl.models.stored import check_stored
from fp8rl.numerics.errors import UserError, user_error
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.model import read_model
from fp8rl.rl.experiment.preconditions.tokenizer import load_tokenizer
from fp8rl.rl.experiment.teacher import TeacherSection
from fp8rl.rollout.server.client import SCORED_SHORT_OF
from fp8rl.trainer.megatron.model_checks import check_engine_layout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY = "teacher.path"


def check_teacher(experiment: Experiment, policy: ModelSizes, tokenizer: PreTrainedTokenizerBase) -> Shape | None:
    """Check that the teacher, if there is one, can be served and asked; returns its shape.

    Raises:
        UserError: its directory or layout is wrong, it has another vocabulary, or no room for the longest answer.
    """
    teacher = experiment.teacher
    if teacher is None:
        return None
    path = teacher.directory
    model = read_model(path, _KEY)
    _check_vocabulary(path, model.sizes, policy, tokenizer, experiment)
    check_teacher_layout(experiment, model.sizes)
    check_stored(path, model, _KEY)
    return model.shape


def check_teacher_layout(experiment: Experiment, sizes: ModelSizes) -> None:
    """Check that a teacher of these sizes divides over its engine's ranks, and has room for the longest answer.

    Raises:
        UserError: no.
    """
    teacher = experiment.teacher
    assert teacher is not None
    numerics = teacher.numerics(experiment.numerics, experiment.numerics_config().k_splits)
    check_engine_layout(sizes, teacher.tp, numerics.rollout_spec, "teacher.tp")
    _check_room(teacher, sizes, experiment)


def _check_vocabulary(
    path: Path, sizes: ModelSizes, policy: ModelSizes, tokenizer: PreTrainedTokenizerBase, experiment: Experiment
) -> None:
    if sizes.vocab_size != policy.vocab_size:
        raise _other_vocabulary(
            f"{path} with vocab_size = {sizes.vocab_size}",
            f"{policy.vocab_size}, that of model.path = {experiment.model.path}",
        )
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(path, _KEY).get_vocab()
    if ours != theirs:
        token = min((t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)), key=repr)
        raise _other_vocabulary(
            f"{path} with a tokenizer that {_knows(token, theirs)}",
            f"that of model.path = {experiment.model.path}, which {_knows(token, ours)}",
        )


def _knows(token: str, vocabulary: dict[str, int]) -> str:
    return f"has {token!r} as token {vocabulary[token]}" if token in vocabulary else f"lacks the token {token!r}"


def _other_vocabulary(found: str, expected: str) -> UserError:
    remedy = "Give teacher.path a model of the same family: token ids are what it is asked about."
    return user_error(_KEY, found=found, expected=expected, remedy=remedy)


def _check_room(teacher: TeacherSection, sizes: ModelSizes, experiment: Experiment) -> None:
    engine = teacher.engine(experiment.rollout)
    longest = experiment.rollout.context_length + SCORED_SHORT_OF
    if engine.context_length < longest:
        raise user_error(
            "teacher.context_length",
            found=engine.context_length,
            expected=f"at least {longest}: rollout.context_length = {experiment.rollout.context_length}, and "
            f"{SCORED_SHORT_OF} tokens that an engine keeps free",
            remedy="Remove teacher.context_length, or lower rollout.context_length.",
        )
    if engine.context_length > sizes.max_positions:
        raise user_error(
            "teacher.context_length",
            found=engine.context_length,
            expected=f"at most {sizes.max_positions}, the max_position_embeddings of {teacher.path}",
            remedy=f"Lower rollout.context_length to at most {sizes.max_positions - SCORED_SHORT_OF}, and remove "
            "teacher.context_length.",
        )
    if teacher.max_total_tokens < engine.context_length:
        raise user_error(
            "teacher.max_total_tokens",
            found=teacher.max_total_tokens,
            expected=f"at least the context length of its engines, {engine.context_length}",
            remedy="Raise teacher.max_total_tokens or lower rollout.context_length.",
        )
