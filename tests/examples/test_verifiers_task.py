"""Tasks of verifiers. The package stands here for itself: the few names of it that are used, with an environment that
counts."""

import asyncio
import sys

import pytest

from fp8rl.rollout.tasks.environments import EnvironmentSection
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.tasks.environments.functions import load_environment
from fp8rl.rollout.tasks.environments.harness import Harness
from fp8rl.rollout.types import Problem, Prompt, SamplingParams
from tests.support.conversations import EOS, Model
from tests.support.paths import EXAMPLES

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
        body = json.dumps({"model": context.model, "messages": [{"role": "user", "content": task.data.prompt}]})
        headers = {"Authorization": "Bearer " + os.environ[context.client.api_key_var]}
        request = urllib.request.Request(context.client.base_url + "/chat/completions", body.encode(), headers)
        answer = json.load(await asyncio.to_thread(urllib.request.urlopen, request))
        said = answer["choices"][0]["message"]["content"]
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
def package(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verifiers/v1/utils").mkdir(parents=True)
    for name, text in FILES.items():
        (tmp_path / f"verifiers/{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.slow
def test_a_task_brings_its_rewards_and_what_the_model_said_is_recorded(tokenizer, package: None) -> None:
    command = [sys.executable, str(EXAMPLES / "verifiers_task.py"), "play", '{"taskset": {"id": "counts"}}']
    config = EnvironmentSection.model_validate({"function": "harness", "harness": {"command": command}})
    harness = load_environment(config)
    assert isinstance(harness, Harness)
    sampling = SamplingParams(100, stop_token_ids=(tokenizer.eos_token_id,))
    problem = Problem("?", "-", fields={"task": {"prompt": "1+2=?"}})
    model = Model(tokenizer, "3" + EOS)

    async def run():
        conversation = Conversation(Prompt(problem, [4]), 7, sampling, model, tokenizer, 30.0)
        try:
            return await conversation.run(harness), conversation.trajectories({})
        finally:
            await harness.close()

    returned, (row,) = asyncio.run(run())
    assert returned == {"reward": 2.0, "right": 2.0, "turns": 1.0}
    assert tokenizer.decode(row.prompt_ids) == "<|user|>1+2=?<|assistant|>"
    assert tokenizer.decode(row.token_ids) == "3" + EOS and len(row.logprobs) == 2
