"""Plays a task of Prime Intellect's `verifiers` as the program of `environment: harness`.

A Python that has verifiers runs this file; it needs nothing of fp8rl."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def main() -> None:
    """Play the task of the standard input (`play CONFIG`), or write tasks as lines of data (`tasks CONFIG COUNT`).

    CONFIG: the `env` block of verifiers' own configuration, as JSON.
    """
    kind, config, *count = sys.argv[1:]
    env = load_environment(resolve_env_config(json.loads(config)))
    if kind == "play":
        print(json.dumps(asyncio.run(played(env, json.load(sys.stdin)["fields"]["task"]))))
        return
    for number, task in zip(range(int(*count)), env.taskset):
        question = task.data.prompt_text or task.data.name or f"task {number}"
        line = {"question": question, "answer": "-", "task": task.data.model_dump(mode="json")}
        print(json.dumps(line, ensure_ascii=False))


async def played(env: Any, data: dict[str, Any]) -> dict[str, float]:
    """The rewards of all traces that are trained on, summed as `reward` and by name, and their metrics."""
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(data), env.taskset.config.task)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, vf.ModelContext(model=os.environ["OPENAI_MODEL"], client=client))
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
