"""The order of a sync and its verdict, against engines that are simulated down to their HTTP client; its manifest; the
proof on the trainer's side that weights beside adapters stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8rl.models import Model
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.tensors import EngineRank
from fp8rl.numerics.delta import LastSent
from fp8rl.numerics.digest import tensor_digest
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import Frozen, freeze
from fp8rl.rollout.engine.protocol import ADAPTER_SCALE
from fp8rl.rollout.engine.server.client import merged
from fp8rl.rollout.types import Endpoint, EngineError
from fp8rl.weight_sync import bridge
from fp8rl.weight_sync.frozen import FrozenBase, check_frozen
from fp8rl.weight_sync.manifest import Manifest, Recorder, ShardDigests, SyncError
from fp8rl.weight_sync.served import served_tensors
from tests.support.definitions import every_tensor

SPEC = QuantSpec.preset("fp8_block_pow2")
WEIGHTS = {
    "model.layers.0.self_attn.q_proj.weight": torch.randn(128, 128).bfloat16(),
    "model.norm.weight": torch.randn(128).bfloat16(),
}
MODEL = every_tensor(layers=1)
ENDPOINTS = [Endpoint(f"http://127.0.0.1:{port}", "", "") for port in (1001, 1002)]


@dataclass
class SimulatedEngine:
    """An engine that takes tensors, commits and answers with its manifest. calls: what was asked of it, in order."""

    endpoint: Endpoint
    calls: list[str] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        async def call(*given: str) -> None:  # pause, resume and flush
            self.calls.append(" ".join([name, *given]))

        return call

    async def commit(self, version: int) -> dict[str, str]:
        self.calls.append(f"commit {version}")
        return {
            name: tensor_digest(tensor) + (f"@{version}" if name + "_scale_inv" in self.tensors else "")
            for name, tensor in self.tensors.items()
        }


@dataclass
class SimulatedTransport:
    """Loads the tensors into every engine; `losses` says which engine does not get which."""

    takes_stacks = False
    losses: dict[int, str] = field(default_factory=dict)
    breaks_after: int | None = None

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    async def send(self, tensors: Iterable[tuple[str, torch.Tensor]], engines: Sequence[SimulatedEngine]) -> None:
        for sent, (name, tensor) in enumerate(tensors):
            if sent == self.breaks_after:
                raise EngineError("/weights_checker answered 500: out of memory")
            for index, engine in enumerate(engines):
                if self.losses.get(index) != name:
                    engine.tensors[name] = tensor
        for engine in engines:
            engine.calls.append("send")


@dataclass
class SimulatedTrainer:
    """What a sync asks of one rank of the trainer. held: what it hands out."""

    model = None
    held: dict[str, torch.Tensor] = field(default_factory=lambda: WEIGHTS)
    exported: int = 0

    @property
    def definition(self) -> Model:
        return MODEL

    @property
    def weights(self) -> SimulatedTrainer:
        return self

    def share(self, model: None, stacked: bool) -> Iterable[tuple[str, torch.Tensor]]:
        for item in self.held.items():
            self.exported += 1
            yield item


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedEngine]:
    made: list[SimulatedEngine] = []

    def make(endpoint: Endpoint, timeout_s: float) -> nullcontext[SimulatedEngine]:
        """A client; all of one engine are the engine."""
        if (known := next((engine for engine in made if engine.endpoint == endpoint), None)) is None:
            made.append(known := SimulatedEngine(endpoint))
        return nullcontext(known)

    monkeypatch.setattr(bridge, "EngineClient", make)
    return made


def push(transport: SimulatedTransport, *ranks: SimulatedTrainer) -> Any:
    def send() -> list[Any]:
        return [
            bridge.send_shard(rank, bridge.SendTask(transport, SPEC, ENDPOINTS, 5))  # type: ignore[arg-type]
            for rank in ranks or [SimulatedTrainer()]
        ]

    return bridge.send_and_verify(send, SPEC, ENDPOINTS, 5)


def test_pause_send_commit_compare_resume(engines: list[SimulatedEngine]) -> None:
    manifest, report, problems = push(SimulatedTransport())
    assert problems == []
    served = dict(served_tensors(WEIGHTS.items(), SPEC, MODEL))
    assert manifest.entries.keys() == served.keys()
    assert (report.version, report.verified_tensors, report.mismatched_tensors) == (5, 3, 0)
    assert report.bytes == 128 * 128 + 4 + 2 * 128
    assert report.seconds == pytest.approx(report.send_seconds + report.verify_seconds)
    assert report.metrics()["sync/verified_tensors"] == 3.0
    for engine in engines:
        assert engine.calls == ["pause retract", "send", "flush", "commit 5", "resume"]


def test_one_engine_that_differs_keeps_all_of_them_paused(engines: list[SimulatedEngine]) -> None:
    for losses in ({1: "model.norm.weight"}, dict.fromkeys((0, 1), "model.norm.weight")):
        engines.clear()
        _, report, problems = push(SimulatedTransport(losses=losses))
        # The same tensor in two engines is counted once.
        assert (len(problems), report.verified_tensors, report.mismatched_tensors) == (len(losses), 2, 1)
        found = "engine http://127.0.0.1:1002: model.norm.weight: found no such tensor, expected "
        assert problems[-1].startswith(found)
        assert all(engine.calls[-1] == "commit 5" and "resume" not in engine.calls for engine in engines)


def test_a_transport_that_fails_midway_leaves_generation_paused(engines: list[SimulatedEngine]) -> None:
    trainer = SimulatedTrainer()
    with pytest.raises(SyncError, match=r"weight version 5: .*out of memory.*stays paused"):
        push(SimulatedTransport(breaks_after=1), trainer)
    for engine in engines:
        assert engine.calls == ["pause retract"]
    assert trainer.exported == len(WEIGHTS)  # else the other ranks would wait in the export's collectives


def test_what_the_ranks_of_an_engine_hold_is_proven_part_by_part(engines: list[SimulatedEngine]) -> None:
    """q is shared by its rows, the norm is on both; one norm that differs is found although the other is right."""

    def held(*norms: torch.Tensor) -> Any:
        """What an engine says of whose ranks these are the norms."""
        said = []
        for rank, norm in enumerate(norms):
            place, entries = EngineRank(rank, 2), {}
            for name, tensor in (served | {"model.norm.weight": norm}).items():
                row = MODEL.tensors[name]
                entries[place.label(name, row)] = tensor_digest(place.part(row, tensor))
            said.append(entries)
        return merged(said)

    served = WEIGHTS | {"model.layers.0.self_attn.q_proj.weight": torch.randn(256, 128).bfloat16()}
    recorder = Recorder(MODEL.tensors, ranks=2)
    list(recorder.watch(served.items()))
    manifest = Manifest.merged(5, QuantSpec.preset("bf16"), [recorder.sent()])
    norm = served["model.norm.weight"]
    assert manifest.differences(held(norm, norm)) == {}
    (problem,) = manifest.differences(held(norm, norm + 1)).values()
    assert problem.startswith("model.norm.weight: found ") and " on another rank, expected " in problem
    assert set(manifest.differences(held(norm))) == {"model.layers.0.self_attn.q_proj.weight#1/2"}


def test_ranks_that_each_send_their_share_are_proven_by_one_manifest(engines: list[SimulatedEngine]) -> None:
    shares = [SimulatedTrainer({name: tensor}) for name, tensor in WEIGHTS.items()]
    manifest, report, problems = push(SimulatedTransport(), *shares)
    assert problems == [] and manifest == push(SimulatedTransport())[0]
    assert (report.verified_tensors, report.bytes) == (3, 128 * 128 + 4 + 2 * 128)


def test_a_tensor_from_two_ranks_is_refused(engines: list[SimulatedEngine]) -> None:
    with pytest.raises(ValueError, match=r"found model.norm.weight sent by two ranks, expected each tensor from one"):
        push(SimulatedTransport(), SimulatedTrainer(), SimulatedTrainer({"model.norm.weight": torch.ones(1)}))
    assert not any("resume" in engine.calls for engine in engines)


MANIFEST = Manifest("7", "spec", {"a.weight": "11@7", "a.weight_scale_inv": "22", "norm": "33"})


def test_every_kind_of_difference_is_one_line_by_name() -> None:
    assert MANIFEST.differences(dict(reversed(MANIFEST.entries.items()))) == {}
    assert list(MANIFEST.differences({"a.weight": "11@6", "norm": "34", "b": "55"}).values()) == [
        "a.weight: found 11@6, expected 11@7",
        "a.weight_scale_inv: found no such tensor, expected 22",
        "b: found 55, expected no such tensor",
        "norm: found 34, expected 33",
    ]


def test_the_recorder_digests_what_passes_and_marks_what_is_dequantized() -> None:
    tensors = {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
        "norm": torch.ones(3, dtype=torch.bfloat16),
    }
    recorder = Recorder(every_tensor(layers=1).tensors)
    passed = dict(recorder.watch(tensors.items()))
    assert all(passed[name] is tensor for name, tensor in tensors.items())
    assert recorder.sent().bytes == 16 + 4 + 6
    delta = recorder.sent(payload=3)  # what is sent is not what the engine holds
    assert (delta.bytes, delta.weight_bytes) == (3, 16 + 4 + 6)
    manifest = Manifest.merged(7, SPEC, [recorder.sent()])
    assert (manifest.version, manifest.spec_digest) == ("7", SPEC.digest())
    assert manifest.entries == {
        "a.weight": tensor_digest(tensors["a.weight"]) + "@7",
        "a.weight_scale_inv": tensor_digest(tensors["a.weight_scale_inv"]),
        "norm": tensor_digest(tensors["norm"]),
    }


def test_a_digest_is_taken_before_the_tensor_is_handed_on() -> None:
    """Whatever happens to it afterwards is seen as a difference."""
    recorder = Recorder(every_tensor(layers=1).tensors)
    sent = torch.ones(8)
    before = tensor_digest(sent)
    for _, tensor in recorder.watch([("x", sent)]):
        tensor[3] = 5
    assert recorder.sent().digests == {"x": before} != {"x": tensor_digest(sent)}


ADAPTER = AdapterSection(rank=8, alpha=16.0)
BASE = {"x.weight": "one", "x.weight_scale_inv": "two"}


def sent(base: dict[str, str], adapters: dict[str, str]) -> ShardDigests:
    return ShardDigests(base | adapters, 100 + 7, 100 + 7, frozenset(adapters), 7)


def test_adapters_go_alone_to_engines_that_hold_what_was_last_proven() -> None:
    held = FrozenBase()
    assert held.contents(3) == "weights and adapters"
    held.completed([sent(BASE, {"a": "first"})], ADAPTER, "weights and adapters")
    held.version = 3
    assert held.contents(3) == "adapters"
    assert held.contents(2) == held.contents(None) == "weights and adapters"  # an engine that came back, or sleeps
    parts = held.completed([sent({}, {"a": "second"})], ADAPTER, "adapters")
    digests = {name: digest for part in parts for name, digest in part.digests.items()}
    assert digests == BASE | {"a": "second", ADAPTER_SCALE: "2.0"}
    assert held.sent is not None and held.sent.weight_bytes == 100


def test_a_trainer_that_sends_another_base_is_refused_by_name() -> None:
    held = FrozenBase()
    held.completed([sent(BASE, {})], ADAPTER, "weights and adapters")
    with pytest.raises(SyncError, match=r"base changed during the run(.|\n)*x\.weight: found other, expected one"):
        held.completed([sent(BASE | {"x.weight": "other"}, {})], ADAPTER, "weights and adapters")


def test_a_frozen_parameter_that_changes_is_named_and_a_trained_one_may() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    trainer: Any = SimpleNamespace(model=model, last_sent=LastSent())
    check_frozen(trainer)
    with torch.no_grad():
        model[1].weight.add_(1)
        check_frozen(trainer)
        model[0].weight[3, 4] += 1e-3
    with pytest.raises(SyncError, match=r"base changed during the run(.|\n)*0\.weight: found"):
        check_frozen(trainer)


def test_a_weight_that_is_read_from_codes_is_digested_there() -> None:
    model = nn.Linear(128, 128, bias=False)
    codes = quantize(model.weight.detach().bfloat16(), SPEC.weight)
    trainer: Any = SimpleNamespace(model=model, last_sent=LastSent())
    check_frozen(trainer)
    freeze(model.weight, Frozen(codes))
    check_frozen(trainer)
    codes.data.view(torch.uint8)[5, 6] ^= 1
    with pytest.raises(SyncError, match="codes of weight"):
        check_frozen(trainer)
