"""Evaluates a model on held-out problems as a run does, without a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.diagnose.subject import Subject, last_numerics, read_served
from fp8rl.models.plain_yaml import parse_yaml
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.rl.experiment import Experiment, load_experiment
from fp8rl.rl.experiment.contents import fetched
from fp8rl.rl.experiment.loading import architecture_of, compose_experiment
from fp8rl.rl.experiment.preconditions import check_functions, read_model
from fp8rl.rl.experiment.preconditions.data import check_data
from fp8rl.rl.experiment.preconditions.tokenizer import read_tokenizer
from fp8rl.rl.record.console import no_room
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.background import Background
from fp8rl.rl.run.evaluation import held_out, set_metrics
from fp8rl.rl.run.events import Events
from fp8rl.rl.run.feed.conversations import Conversations
from fp8rl.rl.run.feed.judging import Judge
from fp8rl.rollout.types import Group, SamplingParams, Trajectory
from fp8rl.serving import serve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVERY_PROBLEM = (1 << 31) - 1
_LOOK_SECONDS = 0.1
_NOTHING_TO_ASK = "--set: found no data file, and no evaluation in the spec, expected one of them. Name a data file."


def read_evaluated(subject: Path, sets: Sequence[str], overrides: Sequence[str]) -> Subject:
    """Read the model of a run or of a directory, and the experiment that evaluates it.

    sets: paths of data files, or entries of `eval.sets` in YAML. They replace the run's own sets; all their problems
    are asked. overrides: keys of the spec, as in training.

    Raises UserError: there is no such model, no evaluation set, or a key or value is wrong.
    """
    _check_keys(subject, overrides)
    served = read_served(subject, "exact", "fp8_block_pow2", architecture_of(overrides))
    given = [_parsed(text) for text in sets]
    asked = []
    if given:
        first = given[0].get("path")
        unused = json.dumps(first if isinstance(first, str) else ".")
        every = f"eval.problems={EVERY_PROBLEM}"
        asked = [f"data.train={unused}", "data.eval=null", f"eval.sets={json.dumps(given)}", every]
    files = RunDir(subject.absolute())
    if files.experiment.is_file():
        spec = load_experiment(files.experiment, asked, lambda text: None) if asked else files.experiment
        experiment = load_experiment(spec, overrides)
    elif not given:
        raise UserError(_NOTHING_TO_ASK)
    else:
        values = {
            "model": {"path": served.experiment.model.path},
            "numerics": {"trainer": "fp8", "rollout": "fp8"},
            "rollout": {"context_length": served.experiment.rollout.context_length},
        }
        experiment = compose_experiment(values, [*asked, *overrides])
        if not any(override.startswith("rollout.max_new_tokens=") for override in overrides):
            sets_asked = held_out(experiment, _tokenizer(experiment))  # the longest prompt leaves room for an answer
            longest = max((len(group.prompt.token_ids) for each in sets_asked for group in each.groups), default=0)
            room = f"rollout.max_new_tokens={max(experiment.rollout.context_length - longest, 1)}"
            experiment = compose_experiment(values, [*asked, room, *overrides])
    if not any((experiment.data.eval, experiment.eval.sets)) or experiment.eval.problems == 0:
        raise UserError(_NOTHING_TO_ASK)
    weights = {"model": served.experiment.model, "adapter": served.experiment.adapter}
    experiment = fetched(experiment.model_copy(update=weights))
    numerics = experiment.numerics_config()
    if files.experiment.is_file() and not any(override.startswith("numerics") for override in overrides):
        numerics = last_numerics(files, experiment)
    return replace(served, numerics=numerics, experiment=experiment)


def evaluate(served: Subject, log: Path, say: Callable[[str], object]) -> dict[str, float]:
    """Evaluate each set on one engine, in the model's numerics. Return the `eval/...` metrics. log: the engine's log.

    Raises:
        UserError: a set or a reward cannot be used; nothing was started. EngineError, HandshakeError, BlockedError,
        TooManyFailuresError: see `Evaluation`.
    """
    experiment, path = served.experiment, served.experiment.model.directory
    tokenizer = _tokenizer(experiment)
    check_data(experiment, tokenizer)
    check_functions(experiment)
    sets = list(held_out(experiment, tokenizer))
    metrics: dict[str, float] = {}
    with ExitStack() as closing:
        events = Events()
        events.subscribe(lambda metric, count, text: say(text))
        judges = [Judge(each.rewards, tokenizer, each.rewards_key or "rewards", events=events) for each in sets]
        for judge in judges:
            closing.callback(judge.close)
        say(f"starting an engine with {path} in {served.numerics.mode} mode")
        server = closing.enter_context(serve(served, log, say))
        background = Background("answers")
        closing.callback(background.close)

        def ask(group: Group, sampling: SamplingParams, *_: object) -> Future[list[Trajectory]]:
            return background.begin(server.generate_in_any_loop([group], sampling))

        answers: list[list[Trajectory]]
        conversations = None
        if experiment.has_environment:
            longest = experiment.rollout.context_length
            conversations = Conversations(experiment.environment, tokenizer, ask, longest, events)
            closing.callback(conversations.close)
        for eval_set, judge in zip(sets, judges, strict=True):
            say(f"asking {len(eval_set.groups)} problems of {eval_set.name or 'data.eval'}")
            if conversations is None:
                answers = [[] for _ in eval_set.groups]
                for answer in background.run(server.generate_in_any_loop(eval_set.groups, eval_set.sampling)):
                    answers[answer.group].append(answer)
            else:
                asked = [conversations.begin(group, eval_set.sampling, 0) for group in eval_set.groups]
                while wait(asked, _LOOK_SECONDS).not_done:
                    conversations.check()
                answers = [future.result() for future in asked]
            verdicts = [judge.begin(group.prompt, found) for group, found in zip(eval_set.groups, answers, strict=True)]
            judged = [[one for one in judge.wait(verdict) if not one.trajectory.branch] for verdict in verdicts]
            metrics |= set_metrics(eval_set, judged)
            answers_given = [one.trajectory for group in judged for one in group]
            if (cut := sum(not one.finished for one in answers_given)) * 2 > len(answers_given):
                say(no_room(cut, len(answers_given), f"max_new_tokens={eval_set.sampling.max_new_tokens}"))
            judge.failures.tell()
            if conversations is not None:
                conversations.failures.tell()
    return metrics


def _check_keys(subject: Path, overrides: Sequence[str]) -> None:
    """Refuse overrides of keys about the model and its adapters. The first argument sets these."""
    free = () if os.path.isfile(subject / "spec.yaml") else ("model.architecture",)
    for override in overrides:
        key = override.partition("=")[0]
        if key.partition(".")[0] in ("model", "adapter") and key not in free:
            raise user_error(
                key,
                found=override,
                expected=f"no key of the model, because {subject} is evaluated",
                remedy="Leave it out, or give another RUN or MODEL.",
            )


def _tokenizer(experiment: Experiment) -> PreTrainedTokenizerBase:
    """Read the tokenizer that renders the questions. Raises UserError: it cannot render them."""
    model = experiment.model.directory
    return read_tokenizer(model, read_model(model, "RUN|MODEL").sizes.vocab_size, "RUN|MODEL")


def _parsed(text: str) -> dict[str, Any]:
    """Parse an entry of `eval.sets` in YAML; a path becomes a set with the file's name."""
    if not text.lstrip().startswith("{"):
        return {"name": Path(text).stem, "path": text}
    try:
        read: dict[str, Any] = parse_yaml(text)
    except ValueError as error:
        raise user_error("--set", found=str(error), expected="YAML of plain values", remedy="Correct it.") from None
    return read
