"""The sync of the trainer's weights to all engines, and its retry policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp8rl.rl.run.engines.canary import Canary, Expected
from fp8rl.rl.run.engines.engines import Engines
from fp8rl.rl.run.events import SYNCS_REPEATED, Events
from fp8rl.rl.run.turns import DeviceTurns
from fp8rl.rollout.types import Endpoint
from fp8rl.weight_sync.bridge import Bridge, SyncReport
from fp8rl.weight_sync.manifest import SyncError


class Syncing:
    """Keeps the engines at the trainer's weights. It owns the bridge, which is another one in other numerics."""

    def __init__(
        self, bridge: Bridge, engines: Engines, events: Events, turns: DeviceTurns, canary: Canary | None = None
    ) -> None:
        """canary: what each engine answers after a sync, to be compared with the trainer's; None: nothing."""
        self.bridge, self.canary = bridge, canary
        self._engines, self._events, self._turns = engines, events, turns

    def renew(self, bridge: Bridge, canary: Canary | None) -> None:
        """Sync by another bridge from now on, which begins with all weights."""
        self.bridge, self.canary = bridge, canary

    @property
    def version(self) -> int:
        """The trainer's weight version."""
        return self.bridge.trainer.weight_version

    def sync(self, manifest: Path | None = None) -> SyncReport:
        """Bring the trainer's weights into every engine that is up, verified; save their digests to `manifest`.

        It is the engines' turn then, and those that slept are awake. An engine that is lost on the way is left to be
        replaced. Raises SyncError, EngineError.
        """
        with self._turns.turn("rollout"):
            self._engines.expect(self.version)
            report = self._sent(self._engines.up, manifest)
        self._events.deliver()
        assert report is not None, "`up` waits for an engine"
        return report

    def welcome(self) -> None:
        """Bring the trainer's weights into engines that have come up, or gone to sleep, since the last sync."""
        self._sent(self._engines.waiting)

    def _sent(self, to: Callable[[], list[Endpoint]], manifest: Path | None = None) -> SyncReport | None:
        """Sync the engines that `to` names, verified; None if there is none.

        The retry policy: if an engine proves to be lost, sync the others anew. If a sync fails although all engines
        live, retry it once, with all weights: its cause may have passed, or an engine did not hold what a change was
        made to.
        """
        failed = False
        while endpoints := to():
            try:
                report = self.bridge.sync(endpoints, manifest, whole=failed)
            except SyncError as error:
                if self._engines.any_lost(endpoints):
                    continue
                if failed:
                    raise
                failed = True
                text = f"a sync failed and is retried: {str(error).splitlines()[0]}"
                self._events.tell(SYNCS_REPEATED, 1, text)
            else:
                if self.canary is not None:
                    scored = self.bridge.trainer.begin_score(self.canary.batch)
                    self._engines.prove(endpoints, Expected(self.canary, self.version, scored))
                self._engines.verified(endpoints)
                return report
        return None
