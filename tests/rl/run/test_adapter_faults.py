"""What a run says of faults of adapters and of the base beside them: the bridge and the rule of what is synced again,
with the plugin's weights at the other end. The engine's server and the way to it are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.delta import LastSent
from fp8rl.rl.run.events import Events
from fp8rl.rl.run.syncing import DeviceTurns, Syncing
from fp8rl.rollout.engine.plugin.weights import ServedWeights
from fp8rl.rollout.engine.protocol import ADAPTER_SCALE, Held
from fp8rl.rollout.types import Endpoint
from fp8rl.weight_sync import bridge
from fp8rl.weight_sync.bridge import Bridge
from fp8rl.weight_sync.config import SyncSection
from fp8rl.weight_sync.manifest import SyncError
from tests.support.served_model import ATTENTION, DEFINITION, MOE, SPEC, build, hf_tensors_served

CONFIG = AdapterSection(rank=4, alpha=8.0)
ADAPTED = DEFINITION.adapted(CONFIG)
MATRIX, B = f"{MOE}experts.1.down_proj.weight", f"{ATTENTION}k_proj.lora_B.weight"
SWAPPED = [f"{MOE}experts.{expert}.up_proj.lora_A.weight" for expert in (0, 2)]


def random(adapters: bool, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    rows = (row for row in ADAPTED.tensors.rows.values() if (row.adapts is not None) == adapters)
    return {row.name: torch.randn(row.shape, generator=draw).bfloat16() for row in rows}


@dataclass
class OneRank:
    """What a sync asks of a trainer of one rank, and what it knows of the rank."""

    base: dict[str, Tensor] = field(default_factory=lambda: random(False, 0))
    adapters: dict[str, Tensor] = field(default_factory=lambda: random(True, 1))
    weight_version: int = 1
    last_sent: LastSent = field(default_factory=LastSent)
    definition = ADAPTED

    def apply(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [function(self, *args)]

    def train(self) -> None:
        self.weight_version += 1
        self.adapters = random(True, self.weight_version)

    @property
    def model(self) -> Any:
        return SimpleNamespace(named_parameters=lambda: self.base.items())

    def export_weights(self) -> Iterable[tuple[str, Tensor]]:
        return iter(self.base.items())

    @property
    def weights(self) -> Any:
        return SimpleNamespace(adapters=lambda model: iter(self.adapters.items()))


class OneEngine:
    """The plugin's weights behind the calls of an `EngineClient`, and the way to them. fault: what happens to the next
    tensors on it."""

    def __init__(self, config: AdapterSection = CONFIG) -> None:
        self.served, self.paused = ServedWeights(SPEC.weight), False
        self.model = build(hf_tensors_served(0))
        self.served.attach(self.model, DEFINITION.adapted(config), "0")
        self.fault: Callable[[dict[str, Tensor]], None] = lambda tensors: None

    async def ping(self) -> str | None:
        return self.served.version

    async def pause(self, mode: str) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def flush(self) -> None: ...

    async def close(self) -> None: ...

    async def commit(self, version: int) -> Held:
        return Held(entries=self.served.commit(str(version)))

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    async def send(self, tensors: Iterable[tuple[str, Tensor]], engines: object, version: int) -> None:
        arriving = dict(tensors)
        self.fault(arriving)
        self.fault = lambda tensors: None
        self.served.invalidate()
        self.served.load(self._load, arriving.items())

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As SGLang does."""
        places = {name: place for name, _, place in self.served.tensors()}
        for name, tensor in weights:
            places[name].copy_(tensor)


@dataclass
class Run:
    trainer: OneRank
    engine: OneEngine
    syncing: Syncing
    told: list[str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    trainer, engine, told = OneRank(), OneEngine(), cast(list[str], [])
    monkeypatch.setattr(bridge, "EngineClient", lambda endpoint, timeout_s: run.engine)
    monkeypatch.setattr(bridge, "make_transport", lambda *args: run.engine)
    events = Events()
    events.subscribe(lambda metric, count, text: told.append(text))
    ends = Bridge(cast(Any, trainer), SPEC, SyncSection(), tmp_path, tmp_path, adapter=CONFIG)
    pool = SimpleNamespace(
        expect=lambda version: None,
        up=lambda: [Endpoint("engine", "", "")],
        any_lost=lambda endpoints: False,
        verified=lambda endpoints: None,
    )
    run = Run(trainer, engine, Syncing(ends, cast(Any, pool), events, DeviceTurns()), told)
    return run


def not_sent(run: Run) -> None:
    run.engine.fault = lambda tensors: cast(None, tensors.pop(B))


def sent_for_other_experts(run: Run) -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        one, two = SWAPPED
        tensors[one], tensors[two] = tensors[two], tensors[one]

    run.engine.fault = swap


def changed_in_the_engine(run: Run) -> None:
    codes = run.engine.model.get_parameter(f"{MOE}experts.w2_weight").data.view(torch.uint8)
    codes[1, 5, 7] ^= 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (not_sent, f"1 of 72 tensors are not what the trainer sent: {B}; generation"),
        (sent_for_other_experts, f"2 of 72 tensors are not what the trainer sent: {', '.join(SWAPPED)}; generation"),
        (changed_in_the_engine, f"1 of 72 tensors are not what the trainer sent: {MATRIX} (1 of the base, which "),
    ],
)
def test_a_fault_is_told_by_name_and_everything_is_sent_again(run: Run, fault: Any, said: str) -> None:
    run.syncing.sync()
    run.trainer.train()
    assert run.syncing.sync().bytes < sum(each.nbytes for each in run.trainer.base.values()) and not run.told
    run.trainer.train()
    fault(run)
    assert run.syncing.sync().mismatched == () and not run.engine.paused
    (told,) = run.told
    assert told.startswith(f"a sync failed and is retried: sync to weight version 3: {said}")


def test_another_scale_is_named_and_nothing_is_sampled(run: Run) -> None:
    run.engine = OneEngine(CONFIG.model_copy(update={"alpha": 16.0}))
    with pytest.raises(SyncError, match=f"^sync .*: 1 of 72 tensors are not what the trainer sent: {ADAPTER_SCALE};"):
        run.syncing.sync()
    assert run.engine.paused and ADAPTER_SCALE in run.told[0]


def test_a_base_that_changes_in_the_trainer_is_named_and_nothing_is_sampled(run: Run) -> None:
    run.syncing.sync()
    run.trainer.train()
    run.trainer.base[MATRIX][3, 4] += 1
    with pytest.raises(SyncError, match=r"^the base changed under the run: found 1 of the trainer's frozen parameters"):
        run.syncing.sync()
    assert run.engine.paused and f"({MATRIX})" in run.told[0]
