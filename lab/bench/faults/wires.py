"""Faults between trainer and engine: connections that break, stall and delay, and bits that flip on the way.

A real stack of one engine, whose address is that of a proxy while weights are sent, or answers asked for.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rl.run.feed.problems import to_prompts
from fp8rl.rl.run.interrupts import BoundedExitStack
from fp8rl.rl.run.run import Run
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.tasks.data import load_problems
from fp8rl.rollout.types import Endpoint, Group, Trajectory
from fp8rl.trainer.trainer import Trainer
from fp8rl.weight_sync.manifest import SyncError
from fp8rl.weight_sync.transports import distributed
from lab.bench.faults.lab import Found, Outcome, Wrong, expect, tried
from tests.support import wire
from tests.support.paths import EXAMPLES
from tests.support.wire import Touch, proxied

STALLED_S = 5
SETTINGS = ["sync.bucket_mib=1", f"sync.answer_within_s={STALLED_S}", "rollout.hung_after_s=6"]
DELAY_S = 0.2
ALWAYS = 1 << 30
ROUNDS = 3


@dataclass
class Pair:
    """A trainer and an engine, synced, and what the engine answers undisturbed."""

    stack: Run
    said: list[str]
    asked: list[Group]
    answers: list[Trajectory]

    @property
    def trainer(self) -> int:
        (pid,) = self.stack.trainer.apply(lambda trainer: os.getpid())
        return pid

    def sync(self, touch: Touch) -> tuple[str, float]:
        """Sync through a proxy, which must end verified, with the same answers: what was said, and its seconds."""
        self.said.clear()
        with self._through(touch):
            since = time.monotonic()
            report = self.stack.syncing.sync()
            seconds = time.monotonic() - since
        expect(report.mismatched_tensors == 0, f"found {report.mismatched_tensors} tensors that differ")
        self.same()
        return " ".join(self.said), seconds

    def fails(self, touch: Touch) -> str:
        """A sync that is damaged each time must end in an error, and leave the engine paused until a good one."""
        try:
            with self._through(touch):
                self.stack.syncing.sync()
        except SyncError as error:
            paused = self.stack.sampling.admit(self.asked[:1], self.stack.sampling.at(1.0))
            time.sleep(2.0)
            expect(not paused[0].answers.done(), "found an engine that answers with weights that nobody has verified")
            self.stack.syncing.sync()
            self.stack.sampling.collect(paused)
            self.same()
            return str(error)
        raise Wrong("found a sync that was verified, expected an error")

    @contextmanager
    def over(self, transport: str) -> Iterator[None]:
        """Syncs go this way."""
        syncing = self.stack.syncing
        bridge = syncing.bridge
        syncing.bridge = replace(bridge, config=bridge.config.model_copy(update={"transport": transport}))
        try:
            yield
        finally:
            syncing.bridge = bridge

    def same(self) -> None:
        expect(self.stack.sampling.sample(self.asked, 1.0) == self.answers, "found other answers than undisturbed")

    def sample(self, touch: Touch) -> float:
        """Seconds of sampling through a proxy, the fewest of `ROUNDS`; the answers must be the same."""

        def connect(engine: Any, endpoint: Endpoint) -> None:
            EngineClient.__init__(engine, endpoint)

        (slot,) = self.stack.engines.slots
        actor, true = slot.actor, slot.endpoint
        assert true is not None
        with proxied(true.url, touch) as url:
            ray.get(actor.__ray_call__.remote(connect, replace(true, url=url)))
            seconds = []
            for _ in range(ROUNDS):
                since = time.monotonic()
                self.same()
                seconds.append(time.monotonic() - since)
            ray.get(actor.__ray_call__.remote(connect, true))
        return min(seconds)

    @contextmanager
    def _through(self, touch: Touch) -> Iterator[None]:
        (slot,) = self.stack.engines.slots
        true = slot.endpoint
        assert true is not None
        with proxied(true.url, touch) as url:
            slot.endpoint = replace(true, url=url)
            try:
                yield
            finally:
                if slot.endpoint == replace(true, url=url):  # else another engine is there
                    slot.endpoint = true


def run() -> dict[str, Outcome]:
    """The outcome of each fault, on one stack."""
    faults: list[Callable[[Pair], Found]] = [
        cut_between_buckets,
        stalled_connection,
        network_delayed,
        bit_flipped_in_transit,
        bit_flipped_in_transit_each_time,
        broadcast_flipped,
        served_file_flipped,
        bits_flipped_in_a_message,
    ]
    with BoundedExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        return tried(faults, _open(folder, closing), partial(print, file=sys.stderr))


def cut_between_buckets(pair: Pair) -> Found:
    """A proxy closes the connection between two buckets of a sync."""
    said, seconds = pair.sync(wire.cut_between_buckets())
    expect("a sync failed and is retried" in said, f"found {said!r}")
    return Found("the sync is retried and verified", {"verified": seconds})


def stalled_connection(pair: Pair) -> Found:
    """A proxy swallows a bucket, and leaves the connection open."""
    said, seconds = pair.sync(wire.swallowed())
    expect("a sync failed and is retried" in said and seconds > STALLED_S, f"found {said!r} after {seconds:.1f} s")
    return Found(f"timeout after sync.answer_within_s ({STALLED_S} s), retried and verified", {"verified": seconds})


def network_delayed(pair: Pair) -> Found:
    """A proxy holds each message of a sync, and of sampling, for 200 ms."""
    said, seconds = pair.sync(wire.delayed(DELAY_S))
    expect(not said, f"found {said!r}")
    sampled, undisturbed = pair.sample(wire.delayed(DELAY_S)), pair.sample(lambda chunk: chunk)
    return Found(
        "slower; the same answers", {"verified": seconds, "answers": sampled, "answers without delay": undisturbed}
    )


def bit_flipped_in_transit(pair: Pair) -> Found:
    """A bit of the shared memory that a bucket travels in, between trainer and engine."""
    said, seconds = pair.sync(wire.flipped_in_memory(pair.trainer))
    expect("are not what the trainer sent" in said, f"found {said!r}")
    return Found("the digests differ: the sync is retried and verified", {"verified": seconds})


def bit_flipped_in_transit_each_time(pair: Pair) -> Found:
    """The same in every sync."""
    error = pair.fails(wire.flipped_in_memory(pair.trainer, ALWAYS))
    expect("are not what the trainer sent: model." in error, f"found {error!r}")
    return Found("SyncError (exit code 3) at the second time; nothing is sampled until a verified sync", {})


def bits_flipped_in_a_message(pair: Pair) -> Found:
    """A bit of the request that says where the tensors lie in a bucket: of the first tensor's offset."""
    said, seconds = pair.sync(wire.flipped_in_message())
    expect("a sync failed and is retried" in said, f"found {said!r}")
    return Found("the sync fails, is retried and verified", {"verified": seconds})


def broadcast_flipped(pair: Pair) -> Found:
    """A bit of a bucket of `sync.transport=distributed`, in the trainer, as its broadcast begins."""

    def flip_next(trainer: Trainer) -> None:
        broadcast = distributed._broadcast

        def flipped(flat: Tensor, group: Any) -> None:
            distributed._broadcast = broadcast
            flat.view(torch.uint8)[1000] ^= 1
            broadcast(flat, group)

        distributed._broadcast = flipped

    pair.stack.trainer.apply(flip_next)
    with pair.over("distributed"):
        said, seconds = pair.sync(lambda chunk: chunk)
    expect("are not what the trainer sent" in said, f"found {said!r}")
    return Found("the digests differ: the sync is retried and verified", {"verified": seconds})


def served_file_flipped(pair: Pair) -> Found:
    """A bit of the weights' file of `sync.transport=disk`, before the engine reads it."""
    with pair.over("disk"):
        said, seconds = pair.sync(wire.flipped_on_disk(pair.stack.folder / "served/sync_checkpoint"))
    expect("a sync failed and is retried" in said, f"found {said!r}")
    return Found("the digests differ: the sync is retried and verified", {"verified": seconds})


def _open(folder: Path, closing: BoundedExitStack) -> Pair:
    experiment = load_experiment(EXAMPLES / "arithmetic.yaml", SETTINGS)
    stack = Run(experiment, experiment.numerics_config(), folder, closing, lambda text: None)
    stack.engines.wait()
    stack.syncing.sync()
    said: list[str] = []
    stack.events.subscribe(lambda metric, count, text: said.append(text))
    problems = load_problems(experiment.data.training[0])[:16]
    asked = to_groups(to_prompts(stack.tokenizer, problems), 4, run_seed=0, step=1)
    return Pair(stack, said, asked, stack.sampling.sample(asked, 1.0))
