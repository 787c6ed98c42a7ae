"""What this machine cannot hold is refused before anything starts."""

import socket
from collections import namedtuple

import pytest
import torch

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import parse_experiment
from fp8rl.rl.experiment.budget.job import job_of
from fp8rl.rl.experiment.budget.memory import engine_memory
from fp8rl.rl.experiment.preconditions import check, resources
from fp8rl.rl.experiment.preconditions.resources import ENGINE_BYTES, RANK_BYTES, kv_cache_bytes
from fp8rl.rollout.engine.server.processes import claim_port
from fp8rl.trainer.state_bytes import state_bytes
from fp8rl.weight_sync.served import served_bytes
from tests.support.preconditions import merged, refusal
from tests.support.tiny_model import TinyModel, write_tiny_model


@pytest.mark.parametrize("tp", (1, 4))
def test_a_kv_cache_beyond_the_free_memory_is_refused(values, monkeypatch, tp):
    memory, rollout = namedtuple("memory", "available"), {"max_total_tokens": 2048, "engines": 2, "tp": tp}
    spec = parse_experiment(merged(values, rollout=rollout))
    # 2 engines x 2048 tokens x 2 layers x 2 kv heads, or 4 with copies, x 128 x (key and value) x 2 bytes
    cache = 2 * 2048 * 2 * max(2, tp) * 128 * 2 * 2
    shape = check(spec).shape
    state = sum(each.total for each in state_bytes(shape, spec.trainer, spec.numerics_config(), "torch").values())
    weights = tp * served_bytes(shape, spec.numerics.config(1).spec, tp)
    needed = cache + RANK_BYTES + state + 2 * (tp * ENGINE_BYTES + weights)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kv_cache_bytes(shape, spec.rollout, 2) == cache
    monkeypatch.setattr(resources.psutil, "virtual_memory", lambda: memory(needed - 1))
    with pytest.raises(UserError, match="rollout.max_total_tokens: found 2048") as error:
        check(spec)
    assert "2047" in str(error.value), "the message says how many tokens would fit"
    check(parse_experiment(merged(values, algorithm={"name": "sft"}, eval={"problems": 0})))  # starts no engine
    check(parse_experiment(merged(values, rollout=rollout, numerics={"kv": "fp8"})))


def test_states_of_sequences_are_counted(values, tmp_path, monkeypatch):
    """Of three linear layers in four: 4 heads of 128 x 64 in FP32, and 3 rows of 2 x 2 x 128 + 4 x 64 channels in BF16.
    SGLang wants three for each answer."""
    memory, model = namedtuple("memory", "available"), tmp_path / "next"
    write_tiny_model(model, TinyModel(layers=4, hidden=256, heads=2, kv_heads=2, family="qwen3_next"))
    values = merged(values, model={"path": str(model)}, rollout={"max_total_tokens": 2048, "max_running_requests": 50})
    spec, state = parse_experiment(values), 3 * (4 * 128 * 64 * 4 + 3 * 768 * 2)
    shape = check(spec).shape
    assert shape.request_bytes() == state and shape.kv_bytes() == 2 * 2 * 128 * 2
    assert kv_cache_bytes(shape, spec.rollout, 2) == 2048 * shape.kv_bytes() + 150 * state
    assert engine_memory(job_of(spec, shape, "kernels", 80e9)).held["states of sequences"]["rollout"] == 150 * state
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trained = sum(each.total for each in state_bytes(shape, spec.trainer, spec.numerics_config(), "torch").values())
    processes = RANK_BYTES + trained + ENGINE_BYTES + served_bytes(shape, spec.numerics.config(1).spec)
    monkeypatch.setattr(resources.psutil, "virtual_memory", lambda: memory(processes + 100 * state))
    with pytest.raises(UserError, match="rollout.max_running_requests: found 50.*states of sequences alone"):
        check(spec)


@pytest.mark.parametrize(
    ("sections", "said"),
    [({"trainer": {"dp": 4000}}, "trainer.dp: found 40"), ({"rollout": {"engines": 4000}}, "rollout.engines: found")],
)
def test_more_processes_than_the_memory_holds_are_refused(values, monkeypatch, sections, said):
    monkeypatch.setattr(resources, "available_memory", lambda: 900 << 30)
    assert refusal(values, **sections).startswith(said)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check(parse_experiment(merged(values, **sections)))


def test_the_limit_of_a_control_group_counts(values, tmp_path, monkeypatch):
    """The innermost of the limited groups decides; file pages not read lately are as good as free."""
    outer, inner = tmp_path / "group", tmp_path / "group" / "job"
    inner.mkdir(parents=True)
    for group, limit, used, files in ((outer, 1 << 30, 1 << 20, 0), (inner, 5000, 4500, 300)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 7\ninactive_file {files}\n")
    own = tmp_path / "own"
    monkeypatch.setattr(resources, "CGROUPS", tmp_path)
    monkeypatch.setattr(resources, "OWN_CGROUP", own)
    own.write_text("4:memory:/x\n0::/group/job\n")
    assert resources.available_memory() == 800
    assert "rollout.engines" in refusal(values)
    (inner / "memory.max").write_text("max\n")
    assert resources.available_memory() <= (1 << 30) - (1 << 20)
    own.write_text("0::/\n")
    assert resources.available_memory() > 0
    check(parse_experiment(values))


def test_a_taken_port_and_a_shared_port_are_refused(values):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        text = refusal(values, rollout={"port": port})
        assert text.startswith(f"rollout.port: found {port}") and "another engine" in text
        with pytest.raises(UserError, match=f"^--port .*: found {port}, expected .* leave it out"):  # of `fp8rl serve`
            claim_port(port, "127.0.0.1")
    check(parse_experiment(merged(values, rollout={"port": port})))
    assert "two engines" in refusal(values, rollout={"port": port, "engines": 2})


def test_shared_memory_without_room_for_an_engine_is_refused_before_anything_starts(values, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: usage(7 << 20))
    said = refusal(values)
    assert said.startswith("/dev/shm: found '7 MiB free', expected 8 MiB, for an engine.") and "--shm-size" in said
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: usage(8 << 20))
    check(parse_experiment(values))
