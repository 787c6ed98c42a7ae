"""Who is told what goes on beside the loop: what was mended, what failed, how many answers are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fp8rl.rl.run.engines.pool import EnginePool
from fp8rl.rl.run.feed.judging import Failures

Tell = Callable[[str, int, str], None]
"""Takes note of what was mended: the metric that counts it, how many there were, and in words."""

ENGINES_REPLACED = "rollout/engines_replaced"
STALE_RESYNCS = "gates/stale_resyncs"
SYNCS_REPEATED = "sync/repeated"


@dataclass
class Listener:
    """Passes on, in the loop's own thread, what others have noted in theirs.

    Attributes:
        pools: of engines, whose losses are news.
        tell: takes note of what was mended.
        progress: told, while groups are waited for, how many of how many are answered.
    """

    pools: list[EnginePool]
    tell: Tell = field(default=lambda metric, count, text: None)
    progress: Callable[[int, int], object] = field(default=lambda done, wanted: None)

    def hear(self) -> None:
        """Tell which engines were replaced since this was last asked."""
        for pool in self.pools:
            for news in pool.news():
                self.tell(ENGINES_REPLACED, news.replaced, news.text)

    def hear_failures(self, *failures: Failures, only_if_explained: bool = False) -> None:
        """Tell which of the user's functions have failed since this was last asked; see `Failures.news`."""
        for each in failures:
            if news := each.news(only_if_explained):
                self.tell(
                    each.metric, len(news), "\n".join(filter(None, news)) or f"{len(news)} more {each.what}s failed"
                )
