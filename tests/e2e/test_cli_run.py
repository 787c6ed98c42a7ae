"""A small run from the command line, and what it leaves in its directory."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml
from transformers import AutoTokenizer

from fp8rl import evaluating
from fp8rl.models import read_shape
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment import read_resolved
from fp8rl.rl.experiment.gate_rules import missing
from fp8rl.rl.record.metrics import METRICS, describe
from fp8rl.rl.run.interrupts import INTERRUPTED
from fp8rl.rollout.engine.engine import Engine
from fp8rl.rollout.types import Endpoint
from fp8rl.trainer.config import TrainerSection
from fp8rl.weight_sync.served import served_bytes
from tests.golden import runs as golden_runs
from tests.golden.runs import DEMO
from tests.support.cli_runs import SMALL, StartedRun
from tests.support.commands import result_of
from tests.support.paths import EXAMPLES
from tests.support.ranks import run_on_ranks
from tests.support.recompute import first_step, trained_scores

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS, PROMPTS, GROUP = 6, 8, 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedRun]:
    """A finished run, the golden one of the demo, in which kernels are compiled, as they are for a user. Whoever
    computes with its model later compiles nothing: the bits are the same."""
    sampled = (
        f"eval.sets=[{{name: sampled, path: {EXAMPLES / 'data/arithmetic_eval.jsonl'}, problems: 8, samples: 3, "
        "temperature: 1.0, top_p: 0.9, pass_at: [1, 3], rewards: [{function: integer}]}]"
    )
    golden = [*DEMO.overrides, "checkpoint.every=2", "tracking.wandb.mode=offline"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHDYNAMO_DISABLE")
        run = StartedRun(tmp_path_factory.mktemp("run"), *golden, sampled)
    try:
        assert run.ends() == 0, run.console()
        yield run
    finally:
        run.destroy()


def test_it_ends_with_the_demo_s_lines_and_no_process(run: StartedRun) -> None:
    said, log = run.console().splitlines(), (run.path / "log.txt").read_text()
    assert said[0] == "fp8rl: checking examples/arithmetic.yaml"
    assert f"run {run.path}" in said
    assert [line.split()[1] for line in said if line.startswith("step ")] == [f"{n}/{STEPS}" for n in range(STEPS + 1)]
    assert any("Trainer and engine agree bit for bit: d = 0 on all" in line for line in said)
    assert any(line.startswith("report   ") for line in said)
    assert all(line.rstrip() in log for line in said[1:])
    for noise in ("Warning", "warning", "megatron", "Apex", "Transformer Engine", "wandb:", "INFO"):
        assert noise not in run.console()
    assert run.family() == []
    assert [path.name for path in run.temporary.iterdir()] == []
    assert "Traceback" not in (run.path / "engine_0.log").read_text()


def test_imports_can_be_interrupted(tmp_path: Path) -> None:
    run = StartedRun(tmp_path, *SMALL)
    try:
        run.wait_for("fp8rl: checking")
        run.signal_all(signal.SIGINT)
        assert run.ends() == INTERRUPTED
        assert run.console().splitlines()[1:] == ["interrupted; nothing was started"]
        assert not run.path.exists()
    finally:
        run.destroy()


def test_its_bits_are_those_of_the_golden_run(run: StartedRun) -> None:
    """Its metrics have others beside, those of a second set that is evaluated."""
    kept = golden_runs.kept()
    if golden_runs.processor_model() not in kept.get(golden_runs.SEEN_ON, []):
        pytest.skip(f"none was seen on {golden_runs.processor_model()}: python -m tests.golden looks")
    found = golden_runs.digests(run.path)
    for part, digest in kept[DEMO.name].items():
        assert part == "metrics" or found[part] == digest, part


def test_every_row_is_complete_and_finite(run: StartedRun) -> None:
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert {"eval/accuracy", "sync/verified_tensors", "mismatch/exact_frac"} <= rows[0].keys()
    experiment = read_resolved(run.path / "spec.yaml")
    measured = {name for name, described in METRICS.items() if missing(described, experiment) is None}
    always = {name for name in measured if not METRICS[name].at_times}
    for row in rows[1:]:
        assert always <= row.keys()
        assert METRICS.keys() & row.keys() <= measured
        assert [name for name in row if name != "step" and describe(name) is None] == [], "each has unit and meaning"
        assert all(math.isfinite(value) for value in row.values())
        assert row["tracking/nonfinite_dropped"] == 0
    last = {name for name in measured - always if name.startswith(("sync/", "eval/", "perf/"))}
    assert last - {"eval/graded"} <= rows[-1].keys() and "eval/graded" not in rows[-1], "all rewards are 0 or 1"


def test_trainer_and_engine_agree_on_every_token_and_a_sync_sends_the_bytes_that_are_calculated(
    run: StartedRun,
) -> None:
    rows = run.rows()
    assert {row["mismatch/train_rollout_logprob_abs_diff_max"] for row in rows} == {0.0}
    assert {row["mismatch/exact_frac"] for row in rows} == {1.0}
    assert all(row["mismatch/tokens"] == row["rollout/tokens"] == row["train/tokens"] for row in rows[1:])
    assert {row["sync/mismatched_tensors"] for row in rows} == {0.0}
    served = served_bytes(read_shape(EXAMPLES / "models/tiny_qwen3_moe"), QuantSpec.preset("fp8_block_pow2"))
    assert {row["sync/bytes"] for row in rows} == {served} == {1_055_216}
    canaries = [row["sync/canary_diff"] for row in rows if "sync/canary_diff" in row]
    assert canaries == [0.0] * STEPS, "of every sync from which something was sampled"
    assert all(row["train/grad_norm"] > 0 for row in rows[1:]), "the weights moved between the syncs"
    digests = [(run.path / f"manifests/step_{step}.json").read_text() for step in range(STEPS + 1)]
    assert len(set(digests)) == STEPS + 1


def test_a_set_of_its_own_is_sampled_and_judged_by_its_rewards(run: StartedRun) -> None:
    for row in (run.rows()[0], run.rows()[-1]):
        assert row["eval/sampled/problems"] == 8 and 0 < row["eval/sampled/finished_fraction"] <= 1
        assert row["eval/sampled/accuracy"] == row["eval/sampled/avg@3"]
        assert row["eval/sampled/pass@1"] == pytest.approx(row["eval/sampled/accuracy"])
        assert 0 < row["eval/sampled/pass@1"] < row["eval/sampled/pass@3"] <= 1, "answers to a problem differ"


def test_the_run_directory_is_whole(run: StartedRun) -> None:
    assert sorted(entry.name for entry in run.path.iterdir()) == [
        *(".fp8rl", "checkpoints", "engine_0.log", "log.txt", "manifests", "metrics.jsonl", "model", "report.html"),
        *("rollouts", "sessions.jsonl", "spec.yaml", "wandb"),
    ]
    assert sorted(entry.name for entry in (run.path / "checkpoints").iterdir()) == ["step_4", "step_6"]
    assert yaml.safe_load((run.path / "spec.yaml").read_text())["rollout"]["prompts_per_step"] == PROMPTS
    assert (run.path / "model/model.safetensors").is_file()
    assert list(run.path.glob("wandb/data/artifacts/staging/*")), "wandb staged its tables inside the run"
    assert "<html" in (run.path / "report.html").read_text()
    for step in range(1, STEPS + 1):
        answers = rollouts(run, step)
        assert len(answers) == PROMPTS * GROUP and {answer["abs_diff_mean"] for answer in answers} == {0.0}
        assert len({answer["prompt"] for answer in answers}) == PROMPTS
        assert [answer["group"] for answer in answers] == [n // GROUP for n in range(PROMPTS * GROUP)]


def test_a_step_is_computed_again_from_what_the_run_left(run: StartedRun, tmp_path: Path) -> None:
    ((metrics, logprobs),) = run_on_ranks(TrainerSection(), tmp_path, partial(first_step, run.path))
    row, answers = run.rows()[1], rollouts(run, 1)
    assert metrics == {name: row[name] for name in metrics} and "train/grad_norm" in metrics
    assert logprobs == [answer["train_logprobs"] for answer in answers]
    assert logprobs == [answer["rollout_logprobs"] for answer in answers], "as d is 0"
    assert row["rollout/reward_mean"] == sum(answer["reward"] for answer in answers) / len(answers)
    assert row["rollout/tokens"] == sum(len(answer["token_ids"]) for answer in answers)
    assert {version for answer in answers for version in answer["weight_versions"]} == {0}


def rollouts(run: StartedRun, step: int) -> list[dict[str, Any]]:
    """The trajectories that a step has left."""
    return [json.loads(line) for line in (run.path / f"rollouts/step_{step}.jsonl").read_text().splitlines()]


def test_the_newest_step_with_its_weights_is_certified_bit_for_bit(run: StartedRun, tmp_path: Path) -> None:
    """The run is over: transformers and our ops score its answers again, from a checkpoint."""
    done = result_of("certify", run.path, "--json", "--page", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["kind"].startswith(f"step {STEPS - 1} of the run") and found["model"].endswith(f"step_{STEPS - 2}")
    sides = {side["name"]: side["verdict"] for side in found["sides"]}
    assert sides == {"the engine": "equal", "the trainer": "equal"}
    assert found["tokens"] == sum(len(answer["token_ids"]) for answer in rollouts(run, STEPS - 1))
    assert 0 < found["floor"]["mean"] < found["sides"][0]["reference"]["mean"], "FP8 is further from FP32 than BF16 is"


def test_the_trained_model_is_served_as_it_was_trained(run: StartedRun, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run.path / "model")
    asked = [answer["prompt_ids"] for answer in rollouts(run, 1)[::4][:4]]
    question: Any = [{"role": "user", "content": rollouts(run, 1)[0]["prompt"]}]
    with served(run, tmp_path) as client:
        (model,) = [model.id for model in client.models.list()]
        answers = []
        for seed, prompt in enumerate(asked):
            sampled = partial(client.completions.create, model=model, prompt=prompt, max_tokens=12, logprobs=0)
            (choice,) = sampled(temperature=1.0, seed=seed).choices
            assert choice.logprobs == sampled(temperature=1.0, seed=seed).choices[0].logprobs
            ids = [token_of(tokenizer)[token] for token in choice.logprobs.tokens]
            answers.append({"prompt_ids": prompt, "token_ids": ids, "logprobs": choice.logprobs.token_logprobs})
            likeliest, greedy = sampled(temperature=1.0, top_p=1e-6).choices[0], sampled(temperature=0.0).choices[0]
            tied = pytest.approx(math.log(0.5)) in likeliest.logprobs.token_logprobs  # either of two equal logits
            assert likeliest.text == greedy.text or tied
        talked = partial(client.chat.completions.create, model=model, messages=question, temperature=0.0)
        chat, parts = talked(logprobs=True, top_logprobs=2), talked(stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == chat.choices[0].message.content
        (prompt,) = {tuple(a["prompt_ids"]) for a in rollouts(run, 1) if a["prompt"] == question[0]["content"]}
        said = chat.choices[0].logprobs
        assert said is not None and said.content is not None
        ids = [token_of(tokenizer)[entry.token] for entry in said.content]
        answers.append({"prompt_ids": [*prompt], "token_ids": ids, "logprobs": [e.logprob for e in said.content]})
        prompts_are_scored_as_lm_eval_asks(client, model, asked[0])
        what_is_wrong_is_refused(client, model)
        the_last_evaluation_is_found_again(client, run)
    (scores,) = run_on_ranks(TrainerSection(), tmp_path, partial(trained_scores, run.path, answers))
    assert scores == [answer["logprobs"] for answer in answers], "bit for bit"


def the_last_evaluation_is_found_again(client: openai.OpenAI, run: StartedRun) -> None:
    """`fp8rl eval` asks the trained model what the run asked at its end, greedily and by seeds, and finds that."""
    model = evaluating.read_evaluated(run.path, [], [])
    server = Engine(model.experiment.rollout, "")
    server.endpoint = Endpoint(str(client.base_url).removesuffix("/v1/"), client.api_key, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluating, "serve", lambda *_: nullcontext(server))
        found = evaluating.evaluate(model, Path(), lambda text: None)
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert found == {name: value for name, value in last.items() if name.startswith("eval/")} and len(found) > 5


def prompts_are_scored_as_lm_eval_asks(client: openai.OpenAI, model: str, prompt: list[int]) -> None:
    """A token that is the most probable one has the log-probability that the list of the most probable ones gives."""
    asked = partial(client.completions.create, model=model, temperature=0.0, logprobs=3)
    (greedy,) = asked(prompt=prompt, max_tokens=6, extra_body={"return_token_ids": True}).choices
    (choice,) = asked(prompt=[*prompt, *greedy.token_ids], max_tokens=1, echo=True).choices
    for found, skipped in ((greedy.logprobs, 0), (choice.logprobs, 1)):
        for value, top in list(zip(found.token_logprobs, found.top_logprobs))[skipped:]:
            assert len(top) == 3 and (value in top.values() or value < min(top.values()))
        ends = [offset + len(token) for offset, token in zip(found.text_offset, found.tokens)]
        assert found.text_offset == [0, *ends[:-1]]
    scored = list(zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs))[len(prompt) : -1]
    assert len(scored) == len(greedy.token_ids)
    assert all(value == max(top.values()) for value, top in scored), "each is the greedy one"
    assert [value for value, _ in scored] == greedy.logprobs.token_logprobs


def what_is_wrong_is_refused(client: openai.OpenAI, model: str) -> None:
    """tests/rollout/engine/server/test_public.py has more; here SGLang itself is behind it, and lives."""
    root = str(client.base_url.join("/"))
    with httpx.Client(base_url=root, headers={"Authorization": f"Bearer {client.api_key}"}) as http:
        assert http.get("server_info").status_code == 404 and http.get("health").status_code == 200
        assert http.get("v1/models", headers={"Authorization": "Bearer another"}).status_code == 401
        for path, asked in (
            ("v1/completions", {"prompt": "1"}),
            ("v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]}),
        ):
            plain = {"model": model, "max_tokens": 1} | asked
            for body, status, part in (
                (plain | {"model": "gpt-4"}, 404, "'gpt-4' does not exist"),
                (plain | {"n": 0}, 400, "n: found 0, expected 1 to 128"),
                (plain | {"temperature": -1}, 400, "temperature"),
                (plain | {"top_p": 0}, 400, "top_p"),
                (plain | {"max_tokens": 10**9}, 400, "1000000000"),
                (plain | {"max_tokens": 8, "min_tokens": 10**9}, 400, "min_new_tokens"),
            ):
                answer = http.post(path, json=body)
                assert answer.status_code == status and part in answer.json()["message"], answer.text
            for change in (
                {"temperature": 1e300, "top_k": 2**31 - 1, "top_p": 1e-300},
                {"frequency_penalty": 2.0, "presence_penalty": -2.0, "repetition_penalty": 1e-9},
                {"max_tokens": 8, "min_tokens": 8, "stop_token_ids": [0], "ignore_eos": True},
                {"n": 128},
            ):
                assert http.post(path, json=plain | change).status_code == 200, change
            unread = plain | {"max_tokens": 100, "ignore_eos": True, "stream": True}
            with http.stream("POST", path, json=unread) as part:
                assert next(part.iter_lines()), "and nobody reads the rest"
            assert http.post(path, json=plain).status_code == 200
        assert http.post("v1/completions", json={"model": model, "prompt": "1"}).status_code == 200, "the engine lives"


@contextmanager
def served(run: StartedRun, folder: Path) -> Iterator[openai.OpenAI]:
    """A client of `fp8rl serve RUN`, which Ctrl-C ends without a trace."""
    command = [Path(sys.executable).with_name("fp8rl"), "serve", run.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("export")), "")
            settings = dict(part.split("=", 1) for part in line.split() if "=" in part)
            with openai.OpenAI(base_url=settings["OPENAI_BASE_URL"], api_key=settings["OPENAI_API_KEY"]) as client:
                yield client
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == INTERRUPTED and not psutil.wait_procs(children, timeout=10)[1]
        finally:
            process.kill()


def token_of(tokenizer: Any) -> dict[str, int]:
    """Each token's number by its text."""
    return {tokenizer.decode([number]): number for number in range(len(tokenizer))}
