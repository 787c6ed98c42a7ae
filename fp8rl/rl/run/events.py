"""The stream of events beside the steps of a run: engines were replaced, syncs repeated, functions have failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fp8rl.rl.run.failures import Failures

Handler = Callable[[str, int, str], object]
"""Takes an event: the metric that counts it, how many there were, and the sentence."""
Progress = Callable[[int, int], object]
"""Takes how many of how many groups that are waited for are answered."""

ENGINES_REPLACED = "rollout/engines_replaced"
STALE_RESYNCS = "gates/stale_resyncs"
SYNCS_REPEATED = "sync/repeated"


class Events:
    """Brings events from any thread to the subscriber, in the loop's own thread. Until there is one, they wait."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, int, str]] = deque()
        self._handle: Handler | None = None
        self._progress: Progress | None = None

    def subscribe(self, handle: Handler, progress: Progress | None = None) -> None:
        """Deliver to these from now on, in place of the subscriber before."""
        self._handle, self._progress = handle, progress

    def add(self, metric: str, count: int, text: str) -> None:
        """Note an event, in any thread."""
        self._waiting.append((metric, count, text))

    def deliver(self) -> None:
        """Hand the subscriber what was added."""
        while self._handle is not None and self._waiting:
            self._handle(*self._waiting.popleft())

    def tell(self, metric: str, count: int, text: str) -> None:
        """Add an event and deliver it."""
        self.add(metric, count, text)
        self.deliver()

    def tell_failures(self, *failures: Failures, only_if_explained: bool = False) -> None:
        """Deliver the failures of the user's functions since the last call; see `Failures.new_messages`."""
        for each in failures:
            if texts := each.new_messages(only_if_explained):
                text = "\n".join(filter(None, texts)) or f"{len(texts)} more {each.what}s failed"
                self.tell(each.metric, len(texts), text)

    def progress(self, done: int, wanted: int) -> None:
        """Tell the subscriber how many of how many groups are answered."""
        if self._progress is not None:
            self._progress(done, wanted)
