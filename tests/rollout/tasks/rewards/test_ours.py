"""Our rewards, called as a run calls them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from fp8rl.rollout.engine.server.launcher import _import_one_model_only
from fp8rl.rollout.engine.server.processes import claim_port
from fp8rl.rollout.engine.server.scratch import remove_scratch
from fp8rl.rollout.tasks.rewards import RewardSection, load_function
from fp8rl.rollout.tasks.rewards.builtin import format, integer, length
from tests.support.http_server import Handler, http_server, url_of
from tests.support.paths import EXAMPLES
from tests.support.servers import wait_until

RIGHT = ["13,18,10\n#### 10", "####10", "#### 9 no\n#### 10", "#### 010"]
WRONG = ["10", "#### 10\n", "#### 10 ", "#### 10.0", "#### 10 #### 9", "#### 10 ####", "#### 1_0", "#### 110"]


def test_our_rewards_by_hand() -> None:
    """The exact integer is wanted at the very end of a finished answer, a pattern of all of it; length is free up to
    a point."""
    for text in (*RIGHT, *WRONG, "#### " + "1" * 100_000, ""):
        assert integer(text, "13,18,10\n#### 10", finished=True) == (text in RIGHT)
        assert integer(text, "13,18,10\n#### 10", finished=False) == 0.0
    assert integer("#### -2125", "#### -2,125", finished=True) == 1.0
    assert integer("#### 21,25", "#### 2,125", finished=True) == integer("one", "one", finished=True) == 0.0
    for text, finished, reward in (("a\n#### 3", True, 1.0), ("a\n#### 3 ", True, 0.0), ("a\n#### 3", False, 0.0)):
        assert format(text, finished=finished, pattern=r".*#### \d+") == reward
    assert [length("", tokens, free=10) for tokens in (0, 10, 15, 30)] == [0.0, 0.0, -0.5, -2.0]


ANSWERS = ["#### 3", "#### 12345", "no"]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with one logit, in FP32, and the example's tokenizer."""
    folder = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_labels": 1, "max_position_embeddings": 512}
    special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    config = Qwen3Config(**sizes, **heads, **special, initializer_range=0.2)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), "score.bias": torch.zeros(1)}, file, {"format": "pt"})  # SGLang makes one up
    AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe").save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_reward_model_behind_sglang_says_what_transformers_says(reward_model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    classifier = Qwen3ForSequenceClassification.from_pretrained(reward_model).eval()
    expected = []
    for answer in ANSWERS:
        conversation = [{"role": "user", "content": "1+2=?"}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
        with torch.no_grad():
            expected.append(classifier(torch.tensor([ids])).logits.item())
    with sglang_serves(reward_model, tmp_path) as url:
        asked = RewardSection(function="model", kwargs={"url": url, "tokenizer": str(reward_model)})
        function = load_function(asked, "rewards.functions.0")
        said = asyncio.run(function({"question": "1+2=?", "answers": ANSWERS}))
    assert function.of_group and function.is_async
    assert said == pytest.approx(expected, abs=1e-4) and max(said) - min(said) > 1


# `python -m sglang.launch_server`, which forks, and whose shared memory has the name of its scratch directory.
FORKING = """
import runpy
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from fp8rl.rollout.engine.server.launcher import _fork, _name_shared_memory

HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER)
HookRegistry.register("sglang.srt.server_args.PortArgs.init_new", _name_shared_memory, HookType.AFTER)
load_plugins()
runpy.run_module("sglang.launch_server", run_name="__main__")
"""


@contextmanager
def sglang_serves(model: Path, scratch: Path) -> Iterator[str]:
    """As a user starts it, beside a run: a stock server of its own, on the CPU."""
    port = str(claim_port(None, "127.0.0.1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "")
        _import_one_model_only("Qwen3ForSequenceClassification")  # it takes a third of the time
        environment = dict(os.environ)
    options = f"--model-path {model} --is-embedding --dtype float32 --host 127.0.0.1 --port {port}".split()
    options += "--max-total-tokens 4096 --context-length 512 --disable-overlap-schedule --sleep-on-idle".split()
    options += "--device cpu --attention-backend torch_native --skip-server-warmup".split()
    settings = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "none", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (scratch / "server.log").open("wb") as log:
        started: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        environment |= {**settings, "TMPDIR": str(scratch)}
        process = subprocess.Popen([sys.executable, "-c", FORKING, *options], env=environment, **started)
    try:
        url = f"http://127.0.0.1:{port}"
        assert wait_until(lambda: process.poll() is not None or answers(url), 300)
        assert process.poll() is None, (scratch / "server.log").read_text()[-3000:]
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        remove_scratch(scratch)


def answers(url: str) -> bool:
    try:
        return httpx.get(url + "/model_info").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kwargs", "embeddings", "expected"),
    [
        ({}, [[0.5], [-1.0]], [0.5, -1.0]),
        ({"label": 1}, [[0.5, 2.0], [-1.0, 3.0]], [2.0, 3.0]),
        ({}, [[0.5, 2.0], [-1.0, 3.0]], "found 2 logits of a reward model and label=None, expected one, or a label"),
        ({}, [[0.5]], "expected 2 classifications, one per answer"),
    ],
)
def test_what_a_reward_model_may_answer(
    kwargs: Any, embeddings: list[list[float]], expected: Any, reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that has the key, and answers as SGLang's /classify does."""
    monkeypatch.setenv("REWARD_KEY", "secret")
    asked: list[tuple[str, str | None, int]] = []

    def reply(path: str, headers: Any, body: Any) -> Any:
        asked.append((path, headers["authorization"], len(body["input_ids"])))
        return [{"embedding": embedding} for embedding in embeddings]

    with service(reply) as url:
        options = {"url": url + "/", "tokenizer": str(reward_model), "key_variable": "REWARD_KEY", **kwargs}
        function = load_function(RewardSection(function="model", kwargs=options), "rewards.functions.0")
        call = function({"question": "1+2=?", "answers": ANSWERS[:2]})
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected):
                asyncio.run(call)
        else:
            assert asyncio.run(call) == expected
    assert asked == [("/classify", "Bearer secret", 2)]


def letters(path: str, headers: Any, body: Any) -> Any:
    return {"letters": len(body["answer"]), "tokens": body["tokens"], **body["fields"]}


@contextmanager
def service(reply: Callable[[str, Any, Any], Any] = letters) -> Iterator[str]:
    """Answers with what `reply` makes of path, headers and body: the number of letters, and what else it was told."""

    class Answering(Handler):
        def do_POST(self) -> None:
            asked = json.loads(self.body())
            body = json.dumps(reply(self.path, self.headers, asked)).encode()
            self.send(body, 500 if asked.get("answer") == "bad" else 200)

    with http_server(Answering) as server:
        yield url_of(server)
