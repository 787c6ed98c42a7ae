"""On which GPUs the engines run."""

from __future__ import annotations

from dataclasses import dataclass

from numerics.errors import user_error


@dataclass(frozen=True)
class Placement:
    """The GPUs of each engine.

    reserved: GPUs that Ray gives to each engine alone. gpus: of each engine, its index among those that it sees.
    """

    reserved: int
    gpus: tuple[int, ...]


def placement(engines: int, gpus: int, ranks: int, own: bool) -> Placement:
    """Where `engines` run, on a cluster of `gpus` GPUs (none: on its CPUs) beside `ranks` trainer ranks.

    own: each engine has a GPU that nobody else uses, as NCCL demands of two processes that talk. Otherwise all GPUs
    are visible to every engine, as CUDA IPC demands, and the trainer's are shared where there are no others.

    Raises:
        UserError: there are too few GPUs for each to have its own.
    """
    if own and 0 < gpus < ranks + engines:
        raise user_error(
            "sync.transport",
            found="distributed",
            expected=f"a GPU for each of {ranks} trainer rank(s) and {engines} engine(s); the cluster has {gpus}",
            remedy="Set sync.transport to tensor, with which engines may share the trainer's GPUs.",
        )
    if own or not gpus:
        return Placement(int(gpus > 0), (0,) * engines)
    return Placement(0, tuple((ranks + index) % gpus for index in range(engines)))
