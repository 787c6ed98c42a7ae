"""Hooks that make a pause safe for an update of the weights, and put its idle time to use.

`/pause_generation {"mode": "retract"}` frees the KV cache of every running request and puts it back into the
scheduler's queue, tokens and log-probabilities kept; resumed, its prefix is prefilled anew, under the weights of then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8rl.rollout.plugin.state import state


def flush_cache(original: Callable[..., bool], self: Any, empty_cache: bool = True) -> bool:
    """`Scheduler.flush_cache`: while paused, requests that wait without any KV cache do not stand in its way.

    The radix tree still holds prefixes of the old weights, and SGLang 0.5.19 refuses to flush while a request waits, or
    dies of it within an update. Its own test of everything else (nothing runs, no chunk is under way) still counts.
    """
    if not self._engine_paused or any(request.kv.holds_kv for request in self.waiting_queue):
        return original(self, empty_cache)
    waiting, self.waiting_queue = self.waiting_queue, []
    try:
        return original(self, empty_cache)
    finally:
        self.waiting_queue = waiting


def process_input_requests(result: None, self: Any, recv_reqs: list[Any]) -> None:
    """`Scheduler.process_input_requests`: a paused scheduler prepares the weights that have come, and then waits for
    the next message instead of burning a core.

    It waits only where the server was started with `--sleep-on-idle`, as on a CPU; elsewhere that call does nothing.
    """
    if self._engine_paused and not recv_reqs:
        state().weights.prepare()
        self.maybe_sleep_on_idle()
