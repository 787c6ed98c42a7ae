"""Clock of a step: where its seconds go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Times steps and their phases. A step lasts from one `lap` to the next, so that nothing goes uncounted."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a step now."""
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}
        self._within = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to the phase `name`, but for that of phases inside it."""
        start, outer, self._within = time.perf_counter(), self._within, 0.0
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self._phases[name] = self._phases.get(name, 0.0) + took - self._within
            self._within = outer + took

    def lap(self) -> dict[str, float]:
        """End the step and begin the next one.

        Gives `perf/<phase>_seconds`, `perf/step_seconds`, and as `perf/overhead_seconds` what no phase accounts for.
        The phase `sync` counts towards the step, and is reported by the sync itself.
        """
        step = time.perf_counter() - self._start
        phases = self._phases
        self.restart()
        named = {f"perf/{name}_seconds": seconds for name, seconds in phases.items() if name != "sync"}
        return named | {"perf/step_seconds": step, "perf/overhead_seconds": step - sum(phases.values())}
