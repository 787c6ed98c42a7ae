"""What the engine answers to a commit and to a question, through SGLang's own /weights_checker."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.models import architecture
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.memory import HostMemory
from fp8rl.rollout.engine.plugin import lifecycle, state
from fp8rl.rollout.engine.protocol import from_checksums, to_action
from fp8rl.rollout.types import EngineError
from fp8rl.weight_sync.manifest import Manifest
from tests.support.served_model import DEFINITION, SPEC, build, hf_tensors_served, load, recorded

TENSORS = hf_tensors_served(0)


@pytest.fixture(autouse=True)
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler process in which SGLang has just loaded the model."""
    monkeypatch.setattr(architecture, "_known", {"Served": DEFINITION.architecture})
    config = {"architectures": ["Served"], "model_type": "Served", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(state, "_state", None)
    state.configure(NumericsConfig(spec=SPEC))
    arguments = SimpleNamespace(weight_version="3", model_path=str(tmp_path))
    one_rank = SimpleNamespace(tp_rank=0, tp_size=1)
    model = build(TENSORS)
    model.definition = DEFINITION
    model.load_weights = lambda weights: load(model, dict(weights))
    lifecycle.load_model(lambda runner: None, SimpleNamespace(model=model, server_args=arguments, ps=one_rank))


def test_an_engine_that_waits_for_a_base_is_not_loaded_from_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.state(), "waits", True)
    runner = SimpleNamespace(server_args=SimpleNamespace(load_format="auto"))
    with pytest.raises(RuntimeError, match="found load_format auto for an engine that reads .* expected dummy"):
        lifecycle.load_model(lambda runner: pytest.fail("loaded"), runner)


def sglang(action: str) -> Any:
    """`check_weights` as SGLang's scheduler calls it."""
    runner = SimpleNamespace(dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16)
    return lifecycle.check_weights(lambda *args, **kwargs: ("stock", kwargs), runner, action=action)


def ask(call: str, **arguments: Any) -> str:
    """The JSON of the plugin's answer, after the way that it takes through SGLang."""
    import msgspec
    from sglang.srt.managers.io_struct import ChecksumInfo

    return from_checksums(msgspec.convert(sglang(to_action(call, **arguments)), ChecksumInfo).checksums)


def held(call: str, **arguments: str) -> dict[str, str]:
    return dict(json.loads(ask(call, **arguments)))


def manifest(version: str, tensors: dict[str, Tensor] = TENSORS) -> dict[str, str]:
    return Manifest.merged(int(version), SPEC, [recorded(tensors)]).entries


def test_a_call_that_fails_is_answered_because_other_ranks_wait_for_the_answer() -> None:
    with pytest.raises(EngineError, match="the engine's plugin: FileNotFoundError: .* No such file .*/proc/0/fd/0"):
        ask("load_bucket", addresses=["/proc/0/fd/0"], tensors=[])


def test_an_update_takes_the_version_away_and_no_forward_runs_before_a_commit_gives_the_next() -> None:
    assert held("manifest") == manifest("3") and state.state().weights.version == "3"
    lifecycle.before_forward(object(), "batch")
    lifecycle.before_update(object(), "any", "arguments")
    assert state.state().weights.version is None
    with pytest.raises(RuntimeError, match="without a version before a forward"):
        lifecycle.before_forward(object(), "batch")
    assert held("commit", version="4") == manifest("4") and state.state().weights.version == "4"
    lifecycle.before_forward(object(), "batch")


@pytest.mark.parametrize("fails", [False, True])
def test_a_bucket_is_answered_when_the_copies_out_of_it_are_done(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that copies after it was asked to, as a GPU does; the sender then writes the bucket again."""
    bucket, parameter, asked = HostMemory("bucket", 40), torch.zeros(2, 2, dtype=torch.bfloat16), []
    flat = bucket.own(writable=True)
    flat[32:].view(torch.bfloat16).copy_(torch.arange(4.0))
    gpu = SimpleNamespace(synchronize=lambda: [copy() for copy in asked])
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)

    def loads(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            asked.append(lambda name=name, tensor=tensor: parameter.copy_(tensor) if name == "b" else None)

    runner = SimpleNamespace(model=SimpleNamespace(load_weights=loads))
    tensors = [("a", "float8_e4m3fn", [5], 0), ("b", "bfloat16", [2, 2], 32), ("c", "float32", [2], 8 + 28 * fails)]
    with pytest.raises(RuntimeError) if fails else nullcontext():
        lifecycle.load_bucket(runner, [bucket.address()], tensors)
    flat.fill_(9)
    assert parameter.tolist() == [[0, 1], [2, 3]], "the copy was not done"
    with pytest.raises(RuntimeError, match="commit"):
        state.state().weights.check()


def test_a_gpu_that_has_no_kernels_for_the_spec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs cannot hold the ops' definitions in torch. The model is on `meta`, in place of a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    runner = SimpleNamespace(model=torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(RuntimeError, match="found NVIDIA A100 and the spec .* expected a data-centre GPU"):
        lifecycle.after_load_model(runner)
