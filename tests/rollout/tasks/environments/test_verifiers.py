"""Tasks of verifiers in a process of its own. The package stands here for itself: the few names of it that are used,
with an environment that counts; docs/agents.md says how the real one was tried."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rollout.tasks.environments.config import EnvironmentSection
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.tasks.environments.functions import load_environment
from fp8rl.rollout.tasks.environments.harness import Harness
from fp8rl.rollout.tasks.environments.verifiers import VerifiersError
from fp8rl.rollout.types import Problem, Prompt, SamplingParams, Trajectory
from tests.support.conversations import EOS, Model

PACKAGE = """
import asyncio, contextlib, json, os, urllib.request
from dataclasses import dataclass
from types import SimpleNamespace as Some

@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str

@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig

class Data:
    @classmethod
    def model_validate(cls, found):
        return Some(**found)

class Task:
    def __init__(self, data, config):
        self.data, self.config = data, config
    data_type = staticmethod(lambda: Data)

class Taskset:
    config = Some(task="of all")
    task_type = staticmethod(lambda: Task)

class Env:
    taskset = Taskset()
    @contextlib.asynccontextmanager
    async def serving(self):
        print("noise that is no answer")
        yield
    def slots(self, task):
        return [task]
    async def run_slot(self, task, context):
        assert task.config == "of all"
        if task.data.kind == "dies":
            os._exit(7)
        if task.data.kind == "waits":
            await asyncio.sleep(600)
        body = json.dumps({"model": context.model, "messages": [{"role": "user", "content": task.data.prompt}]})
        headers = {"Authorization": "Bearer " + os.environ[context.client.api_key_var]}
        request = urllib.request.Request(context.client.base_url + "/chat/completions", body.encode(), headers)
        answer = json.load(await asyncio.to_thread(urllib.request.urlopen, request))
        said = answer["choices"][0]["message"]["content"]
        if task.data.kind == "fails":
            return Some(ok=False, errors=[Some(type="TaskError", message="no luck")], traces=[])
        right = Some(value=2.0 * (said == "3"))
        trace = Some(agent=Some(trainable=True), reward=right.value, rewards={"right": right, "unscored": None},
                     metrics={"turns": 1, "unknown": None}, errors=[])
        judge = Some(agent=Some(trainable=False), reward=9.0, rewards={}, metrics={}, errors=[])
        return Some(ok=True, errors=[], traces=[trace, judge])
"""
LOADERS = """
from verifiers.v1 import Env
resolve_env_config = dict
load_environment = lambda config: {"counts": Env}[config["taskset"]["id"]]()
"""
FILES = {"__init__": "", "v1/__init__": PACKAGE, "v1/utils/__init__": "", "v1/utils/loaders": LOADERS}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verifiers/v1/utils").mkdir(parents=True)
    for name, text in FILES.items():
        (tmp_path / f"verifiers/{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def played(tokenizer: Any, *kinds: str, line: str = "3" + EOS) -> list[tuple[Any, list[Trajectory]]]:
    """What tasks of these kinds return, all at once, and the rows of each."""
    config = EnvironmentSection.model_validate(
        {"function": "verifiers", "kwargs": {"env": {"taskset": {"id": "counts"}}}}
    )
    harness = load_environment(config)
    assert isinstance(harness, Harness)
    sampling = SamplingParams(100, stop_token_ids=(tokenizer.eos_token_id,))

    async def one(kind: str) -> tuple[Any, list[Trajectory]]:
        problem = Problem("?", "-", fields={"task": {"prompt": "1+2=?", "kind": kind}} if kind else {})
        model = Model(tokenizer, line)
        timeout_s = 1.0 if kind == "waits" else 30.0
        conversation = Conversation(Prompt(problem, [4]), 7, sampling, model, tokenizer, timeout_s)
        try:
            return await conversation.run(harness), conversation.trajectories({})
        except (TimeoutError, VerifiersError) as error:
            return error, conversation.trajectories({}, failed=True)

    async def run() -> list[tuple[Any, list[Trajectory]]]:
        try:
            return [*await asyncio.gather(*map(one, kinds[:-1])), await one(kinds[-1])]
        finally:
            await harness.close()

    return asyncio.run(run())


@pytest.mark.slow
def test_a_task_brings_its_rewards_and_what_the_model_said_is_recorded(tokenizer: Any, package: None) -> None:
    first, second = played(tokenizer, "right", "right")
    for returned, (row,) in (first, second):
        assert returned == {"reward": 2.0, "right": 2.0, "turns": 1.0}
        assert tokenizer.decode(row.prompt_ids) == "<|user|>1+2=?<|assistant|>"
        assert tokenizer.decode(row.token_ids) == "3" + EOS and len(row.logprobs) == 2


@pytest.mark.slow
def test_a_task_that_fails_or_ends_the_process_or_hangs_fails_alone(tokenizer: Any, package: None) -> None:
    (failed, _), (late, _), (none, _), (right, _) = played(tokenizer, "fails", "waits", "", "right")
    assert isinstance(failed, VerifiersError) and "TaskError: no luck" in str(failed)
    assert isinstance(late, TimeoutError)
    assert "expected one of the file that `verifiers.py tasks` writes" in str(none)
    assert right["reward"] == 2.0
    (dead, _), (again, _) = played(tokenizer, "dies", "right")
    assert "the process of verifiers ended with status 7" in str(dead)
    assert again["reward"] == 2.0, "the next task has a process of its own"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kwargs": {}},
            "environment.kwargs: found [], expected env, verifiers' own configuration, and python; ",
        ),
        (
            {"kwargs": {"env": {}, "python": "/no/python"}},
            "kwargs.python: found '/no/python', expected a Python",
        ),
        ({"kwargs": {"env": {}, "python": "false"}}, "pip install 'fp8rl[verifiers]', or name the Python"),
        ({"kwargs": {"env": {}}, "harness": {"command": ["ls"]}}, "a program beside function=verifiers"),
        ({"kwargs": {"env": {}}, "harness": {"tool_parser": "x"}}, "harness.tool_parser: found 'x'"),
    ],
)
def test_what_cannot_be_played_is_refused_before_anything_starts(settings: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_environment(EnvironmentSection.model_validate({"function": "verifiers", **settings}))
    assert message in str(caught.value)
