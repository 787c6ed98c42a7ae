"""Runs the trainer as one Ray actor per rank. The training loop calls `TrainerGroup`, which calls all actors."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from torch import Tensor

from fp8rl.models import load_architecture
from fp8rl.numerics.backend.implementation import BOUNDED_MEMORY
from fp8rl.numerics.config import NumericsConfig
from fp8rl.trainer.checkpoint.files import discard
from fp8rl.trainer.config import ActorPlacement, TrainerSection, TrainerSpec
from fp8rl.trainer.distributed.offload import OffloadReport
from fp8rl.trainer.step.batch import Objective, PassResult, Scored, TokenBatch

if TYPE_CHECKING:
    from fp8rl.models.architecture import Role

RANK_ENVIRONMENT = {
    **BOUNDED_MEMORY,
    # One thread per rank: row-invariance is only established for one, and two were slower on two cores.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # As in the engine: the two ends of a broadcast of weights must share memory in one way.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
T = TypeVar("T")


_PULSE_SECONDS = 5.0
"""Seconds between two checks of whether the ranks are alive, while a call waits for them."""
_DYING_SECONDS = 2.0
"""Seconds to wait for Ray to report a dead rank. The other ranks' collective fails a moment before Ray reports it."""
_WATCH = "watch"
"""Name of Ray's concurrency group for methods that answer while a rank computes."""
_WRITER = "writer"
"""Name of Ray's concurrency group for methods that write checkpoints while a rank computes."""
_FREE_MEMORY = ". Free memory, or lower trainer.micro_batch_tokens, rollout.max_total_tokens or rollout.engines"


class TrainerDiedError(RuntimeError):
    """A trainer rank has ended or no longer answers, so its `TrainerGroup` cannot go on."""


class TrainerActor:
    """One rank of the trainer. `start` builds its models (`trainer.roles.Roles`)."""

    def __init__(self, rank: int, config: TrainerSection) -> None:
        self.rank, self.config = rank, config
        self._roles: Any = None
        self._store: Any = None
        self._staged: Any = None

    @ray.method(concurrency_group=_WATCH)
    def pulse(self) -> int:
        """Return the rank's process id. The method has its own thread, so it answers while the rank computes."""
        return os.getpid()

    def open_rendezvous(self, host: str) -> int:
        """Open, at `host`, the store through which ranks find each other. Return its port. Called on rank 0 only."""
        from fp8rl.trainer.distributed import parallel

        self._store = parallel.open_store(host, self.config.world_size)
        return self._store.port

    def start(self, host: str, port: int, spec: TrainerSpec) -> None:
        """Join the other ranks and build the models."""
        from fp8rl.trainer.distributed import parallel

        numerics = spec.numerics
        parallel.start(self.rank, numerics)
        if spec.architecture is not None:
            load_architecture(spec.architecture)
        from fp8rl.trainer.roles import Roles
        from fp8rl.trainer.trainer import check_row_invariance

        if numerics.mode == "exact":
            check_row_invariance(numerics.deepgemm, numerics.kv_format)
        if self._store is None and self.config.world_size > 1:
            self._store = parallel.join_store(host, port, self.config.world_size)
        layout = parallel.initialize(self.config, self.rank, self._store, host)
        self._roles = Roles(spec, layout)

    def apply(
        self, role: Role | None, method: str | Callable[..., T], *args: Any, of_reporting_ranks: bool = False
    ) -> T | None:
        """Call a method of a role's model by its name, or a function that takes the model as its first argument.

        role: with None the call goes to `Roles`, which has all models. of_reporting_ranks: return the result on each
        replica's reporting rank, and None on the other ranks.
        """
        target = self._roles if role is None else self._roles.models[role]
        result = getattr(target, method)(*args) if isinstance(method, str) else method(target, *args)
        return result if self._roles.policy.layout.is_reporting_rank or not of_reporting_ranks else None

    def stage(self, path: Path, extra: dict[str, Any], texts: Mapping[str, str]) -> None:
        self._staged = self._roles.stage(path, extra, texts)

    @ray.method(concurrency_group=_WRITER)
    def write(self) -> bytes:
        """Write what this rank staged last. Return a pickled `Written`: the driver cannot unpickle Megatron's types."""
        return pickle.dumps(self._staged.write())

    @ray.method(concurrency_group=_WRITER)
    def publish(self, parts: list[bytes]) -> None:
        """Finish the checkpoint from the results of every rank's `write`. Called on rank 0 only."""
        self._staged.publish([pickle.loads(part) for part in parts])

    def stop(self) -> None:
        from fp8rl.trainer.distributed import parallel

        self._roles = None
        parallel.shutdown()


class TrainerGroup:
    """All ranks of one trainer. A method returns when every rank is done. Methods without a role work on the policy.

    `forward_backward`, `update` and `score_routed` call the method of this name of `trainer.trainer.Trainer`, or of
    another role's model.

    Attributes:
        weight_version: number of optimizer steps of the policy.
        merges: whether adapters are merged into the weights.

    Raises TrainerDiedError: from any method, when a rank's process has ended.
    """

    def __init__(self, actors: list[Any], hung_after_s: float = 120.0, merges: bool = False) -> None:
        self._actors, self._hung_after_s = actors, hung_after_s
        self.merges = merges
        self._started = False
        self.weight_version = 0

    @classmethod
    def start(cls, spec: TrainerSpec, placements: Sequence[ActorPlacement] | None = None) -> TrainerGroup:
        """Start the ranks on the running Ray cluster and load the model.

        placements: where each rank runs. None: all ranks on this machine, without GPUs.

        Raises UserError: the model, the layout and the sizes do not fit together.
        """
        spec = replace(spec, model_path=Path(spec.model_path).absolute())
        placements = placements or [ActorPlacement()] * spec.config.world_size
        # Actors share the machine with the engine and mostly wait for each other: they ask Ray for no CPU of their own.
        remote = ray.remote(num_cpus=0, concurrency_groups={_WATCH: 1, _WRITER: 1})(TrainerActor)
        actors = [
            remote.options(**placement.actor_options(RANK_ENVIRONMENT)).remote(rank, spec.config)
            for rank, placement in enumerate(placements)
        ]
        group = cls(actors, spec.config.hung_after_s, spec.adapter is not None and spec.adapter.mode == "merged")
        try:
            host = placements[0].host
            port = group._first("open_rendezvous", host) if spec.config.world_size > 1 else 0
            group._all("start", host, port, spec)
        except BaseException:
            group.shutdown()
            raise
        group._started = True
        return group

    def forward_backward(self, batch: TokenBatch, objective: Objective, role: Role = "policy") -> PassResult:
        """Compute the gradients of a batch. `update` applies them. Another pass of the same role discards them. Raises
        NonFiniteLossError: a loss or the gradient norm is not finite. `update` then has no gradients to apply."""
        parts = self._of_reporting(role, "forward_backward", ray.put(batch), ray.put(objective))
        whole = Scored.assembled([(part.rows, part.result) for part in parts], batch, batch.rows)
        return replace(parts[0].result, **vars(whole), seconds=max(part.result.seconds for part in parts))

    def update(self, role: Role = "policy") -> float:
        """Do one optimizer step with the gradients of the last `forward_backward`. Return the learning rate."""
        lr: float = self._all("apply", role, "update")[0]
        self.weight_version += role == "policy"
        return lr

    def update_survival(self) -> float | None:
        """Return how much of the merged adapters survives quantization: :func:`trainer.adapters.update_survival`."""
        if not self.merges:
            return None
        survival: float | None = self._all("apply", "policy", "update_survival")[0]
        return survival

    def train_step(self, batch: TokenBatch, objective: Objective) -> PassResult:
        """Call `forward_backward`, then `update`. For tests and benchmarks: the loop runs its gates between the two."""
        result = self.forward_backward(batch, objective)
        self.update()
        return result

    def score(self, batch: TokenBatch, role: Role = "policy") -> Tensor:
        """Return log-probabilities, or a critic's values. They are fp32 [B, S], zero at index 0 and in the padding."""
        return self.score_routed(batch, role).logprobs

    def score_routed(self, batch: TokenBatch, role: Role = "policy") -> Scored:
        """Like `score`. Also return the router's own choice if the batch has routes, and draws if it has seeds."""
        return Scored.assembled(self._of_reporting(role, "score_routed", ray.put(batch)), batch, batch.rows)

    def begin_score(self, batch: TokenBatch) -> Callable[[], Tensor]:
        """Start `score` with the current weights, and return at once a function that waits for the result. Any thread
        may call this function."""
        calls = self._send("apply", "policy", "score_routed", ray.put(batch), of_reporting_ranks=True)

        def scored() -> Tensor:
            parts = [part for part in self._get(calls) if part is not None]
            return Scored.assembled(parts, batch, batch.rows).logprobs

        return scored

    def set_numerics(self, numerics: NumericsConfig) -> None:
        """Switch every model to other numerics of the same mode, with the same weights. Raises UserError, and changes
        nothing, if the model's sizes do not fit the spec."""
        self._all("apply", None, "set_numerics", numerics)

    def stage(self, path: Path, extra: dict[str, Any], texts: Mapping[str, str]) -> None:
        """Copy the contents of a checkpoint, which `write` then writes. An earlier one must be written already."""
        self._all("stage", Path(path).absolute(), extra, texts)

    def write(self, path: Path) -> None:
        """Write the staged checkpoint to `path`. Another thread may train meanwhile.

        The directory appears complete or not at all.

        Raises OSError: the disk is full, or the bytes read back are not the bytes that were written.
        """
        path = Path(path).absolute()
        try:
            self._first("publish", self._all("write"))
        except BaseException:
            discard(path)
            raise

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint and return its `extra`. The checkpoint may have been written on another layout."""
        extra: dict[str, Any] = self._all("apply", None, "load", Path(path).absolute())[0]
        self.weight_version = self.apply(attrgetter("weight_version"))[0]
        return extra

    def export_hf(self, path: Path) -> None:
        """Write a Hugging Face directory with the current weights and the source's config and tokenizer files."""
        self._all("apply", "policy", "export_hf", Path(path).absolute())

    def export_adapter(self, path: Path, base: Path | None = None) -> None:
        """Write the current adapters as a directory in PEFT's format; see :meth:`trainer.trainer.Trainer`."""
        self._all("apply", "policy", "export_adapter", Path(path).absolute(), base)

    def offload(self) -> list[OffloadReport]:
        """Move each rank's masters, moments and reference to host memory, and discard its gradients.

        Until `onload` a rank can score, send weights and save checkpoints, but not train.
        """
        moved: list[OffloadReport] = self._all("apply", None, "offload")
        return moved

    def onload(self) -> None:
        """Bring back what was offloaded."""
        self._all("apply", None, "onload")

    def apply(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Run `function(trainer, *args)` on every rank, with the policy's trainer. Return the results in rank order."""
        return self._all("apply", "policy", function, *args)

    def shutdown(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _first(self, method: str, *args: Any) -> Any:
        """Call a method of rank 0."""
        return self._get([getattr(self._actors[0], method).remote(*args)])[0]

    def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._get(self._send(method, *args, **kwargs))

    def _of_reporting(self, role: Role, method: str, *args: Any) -> list[Any]:
        return [part for part in self._all("apply", role, method, *args, of_reporting_ranks=True) if part is not None]

    def _send(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(actor, method).remote(*args, **kwargs) for actor in self._actors]

    def _get(self, calls: list[Any]) -> list[Any]:
        """Return the results in order. Call n is rank n's. Raise the first failure at once, without waiting for the
        other ranks: in a collective with the failed rank they may hang for minutes."""
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_PULSE_SECONDS)
            if not done:
                if self._started:  # before, a process may be long in coming up
                    self._check_pulses()
                continue
            try:
                ray.get(done)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, RuntimeError):  # as torch raises where the other end of a collective is gone
                    self._check_alive()
                # The rank's own exception, so that callers can tell a UserError from a bug; Ray's shows where it rose.
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise _died(calls.index(done[0]), error) from error
        return ray.get(calls)

    def _check_alive(self) -> None:
        """Raise TrainerDiedError if a rank's process has ended. A slow answer is no error."""
        pulses = [actor.pulse.remote() for actor in self._actors]
        ready, _ = ray.wait(pulses, num_returns=len(pulses), timeout=_DYING_SECONDS)
        for pulse in ready:
            try:
                ray.get(pulse)
            except ray.exceptions.RayError as error:
                raise _died(pulses.index(pulse), error) from error

    def _check_pulses(self) -> None:
        """Raise TrainerDiedError if a rank's process does not answer. (If it has ended, its own call fails.)"""
        pulses = [actor.pulse.remote() for actor in self._actors]
        _, silent = ray.wait(pulses, num_returns=len(pulses), timeout=self._hung_after_s)
        if silent:
            raise TrainerDiedError(
                f"trainer rank {pulses.index(silent[0])}: found no answer within {self._hung_after_s:g} s "
                "(trainer.hung_after_s), expected a heartbeat also while it computes; its process is alive"
            )


def _died(rank: int, error: ray.exceptions.RayError) -> TrainerDiedError:
    remedy = _FREE_MEMORY if isinstance(error, ray.exceptions.OutOfMemoryError) else ""
    why = "out of memory, a signal, or its node left?"
    if not isinstance(error, ray.exceptions.RayActorError):  # Ray's memory monitor, for one, says what it found
        why = str(error).strip().splitlines()[0]
    return TrainerDiedError(f"trainer rank {rank}: found its process ended ({why}), expected it to answer{remedy}")
