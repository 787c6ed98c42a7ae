"""A run of adapters behind OpenAI's API: its model and the base beside it, by name and in one batch."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from fp8rl import serving
from fp8rl.diagnose.subject import read_served
from fp8rl.models import read_model
from fp8rl.models.checkpoint.peft import write_adapter
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment, load_experiment
from fp8rl.trainer.config import TrainerSection
from tests.support.paths import EXAMPLES
from tests.support.ranks import run_on_ranks
from tests.support.recompute import scores_beside

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPTS = [[11, 12, 13, *range(20, 20 + 7 * n)] for n in range(4)]
SETTINGS: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30, "logprobs": 0, "seed": 3}
RAW = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run leaves that is served, with adapters that move every log-probability."""
    path = tmp_path / "run"
    path.mkdir()
    experiment = load_experiment(EXAMPLES / "arithmetic_lora.yaml", ["adapter.rank=4", "adapter.alpha=8"])
    (path / "spec.yaml").write_text(experiment.to_yaml())
    write(path / "adapter", experiment, experiment.model.path)
    return path


def write(path: Path, experiment: Experiment, base: Any) -> None:
    definition, draw = read_model(Path(experiment.model.path)).adapted(experiment.adapter), torch.Generator()
    rows = [row for row in definition.tensors.rows.values() if row.adapts is not None]
    tensors = {row.name: torch.randn(row.shape, generator=draw).bfloat16() / 5 for row in rows}
    write_adapter(path, tensors, definition, Path(base))


def test_the_model_and_its_base_are_served_side_by_side_as_the_trainer_scores_them(
    run: Path, tmp_path: Path, warm_engines: None
) -> None:
    served = read_served(run, "exact", "fp8_block_pow2").with_tools("qwen25")
    with serving.serve(served, tmp_path / "engine.log", print) as server:
        url, key = f"{server.endpoint.url}/v1", server.endpoint.api_key
        with openai.OpenAI(base_url=url, api_key=key) as client, ThreadPoolExecutor(16) as at_once:
            names = [model.id for model in client.models.list()]
            assert names == ["run", "run-base"]
            with pytest.raises(openai.NotFoundError, match="'base' does not exist; this server has 'run' and 'run-ba"):
                client.completions.create(model="base", prompt="1")

            def ask(name: str, prompt: Any, **more: Any) -> list[dict[str, Any]]:
                answer = client.completions.create(model=name, prompt=prompt, **SETTINGS, **more, extra_body=RAW)
                return [
                    {"token_ids": each.token_ids, "logprobs": each.logprobs.token_logprobs}  # type: ignore
                    for each in answer.choices
                ]

            asked = [(name, prompt) for prompt in PROMPTS for name in names]
            together = list(at_once.map(lambda each: ask(*each)[0], asked))
            assert [ask(*each)[0] for each in asked] == together, "alone, with all prefixes cached by both"
            several = {name: ask(name, PROMPTS, n=2) for name in names}
            check_chats(client)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for (name, prompt), answer in zip(asked, together, strict=True):
        found[name].append({"prompt_ids": prompt, **answer})
    for name in names:
        pairs = [prompt for prompt in PROMPTS for _ in range(2)]
        found[name] += [{"prompt_ids": p, **answer} for p, answer in zip(pairs, several[name], strict=True)]
    ((adapted, bare),) = run_on_ranks(TrainerSection(), tmp_path, partial(scores_beside, run, *found.values()))
    assert adapted == [answer["logprobs"] for answer in found["run"]], "bit for bit"
    assert bare == [answer["logprobs"] for answer in found["run-base"]], "bit for bit"
    assert all(one["logprobs"] != two["logprobs"] for one, two in zip(*found.values(), strict=True))


def check_chats(client: openai.OpenAI) -> None:
    """A form that is asked for holds, and a history may have calls of tools, with and without arguments."""
    form = {"type": "object", "properties": {"a": {"enum": [12]}}, "required": ["a"], "additionalProperties": False}
    asked = partial(client.chat.completions.create, model="run", temperature=0.0, max_tokens=160)
    user: Any = {"role": "user", "content": "1+2=?"}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": form}}
    answer = asked(messages=[user], response_format=schema)
    assert json.loads(answer.choices[0].message.content or "") == {"a": 12}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": form, "strict": True}}]
    (call,) = asked(messages=[user], tools=tools, tool_choice="required").choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"a": 12}
    for arguments in ("", "null", '{"a": 12}'):
        calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}]
        history: Any = [user, {"role": "assistant", "content": "1", "tool_calls": calls}]
        history += [{"role": "tool", "tool_call_id": "c", "content": "3"}]
        assert asked(messages=history, tools=tools).choices[0].finish_reason


def test_an_adapter_of_another_base_is_refused_before_an_engine_starts(run: Path, tmp_path: Path) -> None:
    experiment = load_experiment(run / "spec.yaml")
    other = tmp_path / "other"
    serving.convert_checkpoint(Path(experiment.model.path), other, experiment.numerics_config().spec)
    write(run / "adapter", experiment, other)
    with pytest.raises(UserError, match="trained on weights with the digest .* Give the model that they were tra"):
        with serving.serve(read_served(run, "exact", "fp8_block_pow2"), tmp_path / "engine.log", print):
            raise AssertionError("an engine was started")
    assert not (tmp_path / "engine.log").exists()
