"""Environments of Prime Intellect's `verifiers`, played by that package in a process of its own, by its own Python.

The process needs nothing of ours, and this file is its program too, so it imports the standard library alone. It plays
many tasks at once; its agents send their requests to the run's endpoint, where they are recorded.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8rl.rollout.types import Problem

_KEPT = 40
"""Last lines of the process's errors that a message has."""
_MOST_BYTES = 1 << 26


class VerifiersError(Exception):
    """The process of verifiers ended, or a task could not be played."""


class Verifiers:
    """Plays tasks: a call has a base URL, a key and a problem, whose field `task` is a line of `tasks`."""

    def __init__(self, env: Mapping[str, Any], python: str = sys.executable) -> None:
        """env: the `env` block of verifiers' own configuration. python: the interpreter that has verifiers."""
        from fp8rl.rollout.tasks.environments import supervisor  # here alone: verifiers' own Python runs this file, too

        self._command = (*supervisor.COMMAND, python, "-P", __file__, "play", json.dumps(env))
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: list[asyncio.Task[None]] = []
        self._errors: deque[str] = deque(maxlen=_KEPT)
        self._starting = asyncio.Lock()
        self._number = 0

    async def __call__(self, base_url: str, api_key: str, problem: Problem) -> dict[str, float]:
        """Return the task's reward, and its named rewards and metrics.

        Raises VerifiersError.
        """
        if not isinstance(task := problem.fields.get("task"), Mapping):
            raise VerifiersError(
                f"task: found a problem with the fields {sorted(problem.fields)}, expected one of the file that "
                "`verifiers.py tasks` writes"
            )
        async with self._starting:
            process = await self._started()
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            asked = {"number": number, "base_url": base_url, "api_key": api_key, "task": dict(task)}
            _write(process, asked)
            said = await answer
        except asyncio.CancelledError:
            _write(process, {"number": number})
            raise
        finally:
            del self._waiting[number]
        if "error" in said:
            raise VerifiersError(said["error"])
        returned: dict[str, float] = said["returned"]
        return returned

    async def close(self) -> None:
        """End the process and all that it has started."""
        from fp8rl.rollout.deadlines import GRACE_S, end_process, within

        process, self._process = self._process, None
        if process is not None:
            await end_process(process)
        with suppress(TimeoutError):  # what the process has left behind may hold its pipes open
            await within(GRACE_S, asyncio.gather(*self._reading))

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            await self.close()
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_MOST_BYTES,
            )
            self._reading = [asyncio.ensure_future(self._answers(process)), asyncio.ensure_future(self._said(process))]
        return self._process

    async def _answers(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line)
            if (answer := self._waiting.get(said["number"])) is not None and not answer.done():
                answer.set_result(said)
        status = await process.wait()
        await asyncio.sleep(0)
        for answer in self._waiting.values():
            if not answer.done():
                why = "".join(self._errors).strip()
                answer.set_exception(VerifiersError(f"the process of verifiers ended with status {status}: {why}"))

    async def _said(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            self._errors.append(line.decode(errors="replace"))


def _write(process: asyncio.subprocess.Process, message: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    if not process.stdin.is_closing():
        process.stdin.write(json.dumps(message).encode() + b"\n")


# What follows runs in the process.


def main() -> None:
    """Play tasks of the standard input (`play CONFIG`), or write tasks as lines of data (`tasks CONFIG COUNT`)."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    kind, config, *count = sys.argv[1:]
    env = load_environment(resolve_env_config(json.loads(config)))
    if kind == "tasks":
        for number, task in zip(range(int(*count)), env.taskset):
            question = task.data.prompt_text or task.data.name or f"task {number}"
            line = {"question": question, "answer": "-", "task": task.data.model_dump(mode="json")}
            print(json.dumps(line, ensure_ascii=False))
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints is no answer
    asyncio.run(_play(vf, env, answers))


async def _play(vf: Any, env: Any, answers: Any) -> None:
    reader = asyncio.StreamReader(limit=_MOST_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    playing: dict[int, asyncio.Task[None]] = {}
    keys: dict[str, str] = {}

    async def play(asked: dict[str, Any]) -> None:
        said: dict[str, Any]
        try:
            said = {"returned": await _played(vf, env, asked, keys)}
        except Exception as error:  # of an environment; the others go on
            said = {"error": f"{type(error).__name__}: {error}"}
        finally:
            del playing[asked["number"]]
        print(json.dumps({"number": asked["number"], **said}), file=answers, flush=True)

    async with env.serving():
        async for line in reader:
            asked = json.loads(line)
            if "task" in asked:
                playing[asked["number"]] = asyncio.create_task(play(asked))
            elif (stopped := playing.get(asked["number"])) is not None:
                stopped.cancel()


async def _played(vf: Any, env: Any, asked: dict[str, Any], keys: dict[str, str]) -> dict[str, float]:
    """Play one task. keys: the environment variable of each key so far; verifiers reads keys from there alone, and
    keeps a client for each."""
    variable = keys.setdefault(asked["api_key"], f"FP8RL_API_KEY_{len(keys)}")
    os.environ[variable] = asked["api_key"]
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(asked["task"]), env.taskset.config.task)
    client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
    (slot,) = env.slots(task)
    episode = await env.run_slot(slot, vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{each.type}: {each.message}" for each in errors) or "the task was not finished")
    found: dict[str, float] = {"reward": 0.0}
    for trace in (each for each in episode.traces if each.agent.trainable):
        found["reward"] += trace.reward
        found |= {name: float(each.value) for name, each in trace.rewards.items() if each is not None}
        found |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return found


if __name__ == "__main__":
    main()
