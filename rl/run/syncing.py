"""The sync of the trainer's weights to all engines, and its retry policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fp8rl.rl.run.engines.canary import Canary, Expected
from fp8rl.rl.run.engines.pool import EnginePool
from fp8rl.rl.run.listener import SYNCS_REPEATED, Listener
from fp8rl.rl.run.turns import Turns
from fp8rl.rollout.types import Endpoint
from fp8rl.weight_sync.bridge import Bridge, SyncReport
from fp8rl.weight_sync.manifest import SyncError


@dataclass
class Syncing:
    """Keeps the engines at the trainer's weights.

    Attributes:
        bridge: from the trainer of now to the engines, in the numerics of now.
        canary: what each engine is asked for after a sync; None: nothing.
    """

    bridge: Bridge
    engines: EnginePool
    listener: Listener
    turns: Turns
    canary: Canary | None = None

    @property
    def version(self) -> int:
        """The trainer's weight version."""
        return self.bridge.trainer.weight_version

    def sync(self, manifest: Path | None = None) -> SyncReport:
        """The trainer's weights into every engine that is up, verified; their digests are saved to `manifest`.

        It is the engines' turn then, and those that slept are awake. An engine that is lost on the way is left to be
        replaced. Raises SyncError, EngineError.
        """
        with self.turns.turn("rollout"):
            self.engines.expect(self.version)
            report = self._sent(self.engines.up, manifest)
        self.listener.hear()
        assert report is not None, "`up` waits for an engine"
        return report

    def welcome(self) -> None:
        """The trainer's weights into engines that have come up, or gone to sleep, since the last sync."""
        self._sent(self.engines.waiting)

    def _sent(self, to: Callable[[], list[Endpoint]], manifest: Path | None = None) -> SyncReport | None:
        """A verified sync of the engines that `to` names; None if there is none.

        The one rule: where an engine proves to be lost, the others are sent everything again. A sync that fails
        although all live is done again, once and whole: whatever broke it may have been of that moment, or an engine
        did not hold what a change was made to.
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
                text = f"a sync failed and is done again: {str(error).splitlines()[0]}"
                self.listener.tell(SYNCS_REPEATED, 1, text)
            else:
                if self.canary is not None:
                    scored = self.bridge.trainer.begin_score(self.canary.batch)
                    self.engines.prove(endpoints, Expected(self.canary, self.version, scored))
                self.engines.verified(endpoints)
                return report
        return None
