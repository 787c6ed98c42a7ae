"""The sync of the trainer's weights to all engines, its retry policy, and the turns of both sides on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from fp8rl.rl.run.engines.canary import Canary
from fp8rl.rl.run.engines.engines import Engines
from fp8rl.rl.run.events import SYNCS_REPEATED, Events
from fp8rl.rollout.types import Endpoint
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.weight_sync.bridge import Bridge, SyncReport
from fp8rl.weight_sync.manifest import SyncError

Side = Literal["rollout", "train"]


class DeviceTurns:
    """Says which side, engines or trainer, may use the device now.

    On shared GPUs the engines sleep while the trainer works, and the optimizer's state is in host memory while engines
    sample. Sleeping engines hold no weights. They get no groups until the next sync brings all weights and wakes them;
    until then no lost engine is replaced.

    On separate GPUs nothing moves, and engines that sample ahead continue while the trainer trains.
    """

    def __init__(self, sharing: tuple[Engines, TrainerGroup] | None = None) -> None:
        """sharing: both sides, if they share GPUs. The first turn is the trainer's."""
        self._sharing = sharing
        self._there: Side = "train"
        self._holder: Side | None = None
        self._metrics: dict[str, float] = {}
        self._first_behind: float | None = None

    @contextmanager
    def turn(self, side: Side) -> Iterator[None]:
        """Give the device to one side for the block. A side may take the device again inside its own turn.

        Raises RuntimeError: the other side has the device, and would lose the memory that it computes with.
        """
        before = self._holder
        if before not in (None, side):
            raise RuntimeError(f"found the turn of {before}, expected it to end before the turn of {side} begins")
        self._holder = side
        try:
            if self._sharing is not None and self._there != side:
                began = time.perf_counter()
                self._make_room(side, *self._sharing)
                seconds = self._metrics.get("perf/turn_seconds", 0.0) + time.perf_counter() - began
                self._metrics["perf/turn_seconds"] = seconds
                self._there = side
            yield
        finally:
            self._holder = before

    def metrics(self) -> dict[str, float]:
        """Return, since the last call, `memory/...` of the fullest rank or engine, and the seconds that turns took."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _make_room(self, side: Side, engines: Engines, trainer: TrainerGroup) -> None:
        """Have the other side free its memory, then have `side` take back its own."""
        if side == "train":
            slept = engines.sleep()
            trainer.onload()
            if slept:
                behind = float(max(each.behind for each in slept))
                self._first_behind = behind if self._first_behind is None else self._first_behind
                self._metrics |= {
                    "memory/engine_released_bytes": float(max(each.released for each in slept)),
                    "memory/behind_bytes": behind,
                    "memory/behind_growth_bytes": behind - self._first_behind,
                }
        else:
            moved = trainer.offload()
            engines.wake()
            fullest = max(moved, key=lambda each: each.moved + each.stays)
            self._metrics |= {
                "memory/trainer_moved_bytes": float(fullest.moved),
                "memory/trainer_stays_bytes": float(fullest.stays),
            }


class Syncing:
    """Keeps the engines at the trainer's weights. Bridge and canary are replaced when the numerics change. The first
    sync of a bridge sends all weights."""

    def __init__(
        self, bridge: Bridge, engines: Engines, events: Events, turns: DeviceTurns, canary: Canary | None = None
    ) -> None:
        """canary: the sequence that each engine and the trainer score after a sync, to compare them; None: no check."""
        self.bridge, self.canary = bridge, canary
        self.engines, self.events, self.turns = engines, events, turns

    @property
    def version(self) -> int:
        """The trainer's weight version."""
        return self.bridge.trainer.weight_version

    def sync(self, manifest: Path | None = None) -> SyncReport:
        """Send the trainer's weights to every engine that is up, and verify them; save their digests to `manifest`.

        Afterwards it is the engines' turn, and sleeping engines are awake. An engine that is lost during the sync is
        left out, and replaced later. Raises SyncError, EngineError.
        """
        with self.turns.turn("rollout"):
            self.engines.expect(self.version)
            report = self._sync_with_retry(self.engines.up, manifest)
        self.events.deliver()
        assert report is not None, "`up` waits for an engine"
        return report

    def sync_new_engines(self) -> None:
        """Send the trainer's weights to engines that have started since the last sync, and to sleeping ones."""
        self._sync_with_retry(self.engines.waiting)

    def _sync_with_retry(self, to: Callable[[], list[Endpoint]], manifest: Path | None = None) -> SyncReport | None:
        """Sync the engines that `to` returns, and verify them. Return None if there are none.

        If an engine is lost meanwhile, sync the other engines again. If a sync fails while all engines live, retry once
        with all weights: the cause may have passed, or an engine did not hold the weights that a delta changes.
        """
        failed = False
        while endpoints := to():
            try:
                report = self.bridge.sync(endpoints, manifest, whole=failed)
            except SyncError as error:
                if self.engines.any_lost(endpoints):
                    continue
                if failed:
                    raise
                failed = True
                text = f"a sync failed and is retried: {str(error).splitlines()[0]}"
                self.events.tell(SYNCS_REPEATED, 1, text)
            else:
                if self.canary is not None:
                    score = self.bridge.trainer.begin_score(self.canary.batch)
                    self.engines.run_canaries(endpoints, self.canary, self.version, score)
                self.engines.verified(endpoints)
                return report
        return None
