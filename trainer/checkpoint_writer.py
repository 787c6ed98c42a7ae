"""Megatron's checkpoint files, written by the trainer's own process.

megatron-core 0.16.1 writes even a synchronous checkpoint through a spawned manager process and forked writers
(filesystem_async.py:51 and :237). The manager outlives a killed trainer, and forking a process that runs gloo and Ray
threads can deadlock. A trainer waits for its checkpoint anyway, so it writes the same files itself.
"""

from __future__ import annotations

import queue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


def install() -> None:
    """Make Megatron write checkpoints in this process. Idempotent."""
    filesystem_async._get_write_results_queue = queue.Queue
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write)


def _write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue) -> None:
    """Write each bucket to its file and put {bucket number: write results}, or the exception, into `results`."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        outcome: queue.Queue = queue.Queue()
        pending: queue.Queue = queue.Queue()
        pending.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, outcome, pending, True, use_msc=use_msc
        )
        _, written[number] = outcome.get()
        if isinstance(written[number], Exception):
            results.put(written[number])
            return
    results.put(written)
