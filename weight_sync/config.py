"""What the `sync:` section of an experiment spec may say."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from numerics.io.section import Section

ANSWER_WITHIN_S = 600.0


class SyncConfig(Section):
    """How weights travel from the trainer to the engines."""

    transport: Literal["tensor", "distributed", "disk"] = "tensor"
    """`tensor`: memory that the engines map, where they compute on the trainer's CPU or GPU; `distributed`: a broadcast
    (NCCL, or gloo on a CPU), where they have GPUs of their own; `disk`: safetensors files."""
    pause: Literal["retract", "abort", "in_place"] = "retract"
    """What becomes of answers that are under way when weights change, so that each token is one of weights that it
    names. `retract`: they wait, and go on with their prefix prefilled anew. `abort`: they are cut and asked for again,
    which takes a second longer. `in_place`: they go on with the KV cache of the old weights, and no weights alone have
    sampled the rest; native mode only."""
    delta: bool = False
    """Send only the bytes that have changed, where every engine holds what was sent last; else, and where the proof
    finds a difference, all of them. Each trainer rank keeps a copy of what it sends."""
    bucket_mib: int = Field(default=256, ge=1)
    """Largest send buffer in MiB, of which a few are held; a larger tensor gets one of its own."""
    answer_within_s: float = Field(default=ANSWER_WITHIN_S, ge=1.0)
    """Seconds that an engine may take to answer one message of a sync. A connection may be gone without a word, while
    both ends wait."""

    @property
    def engines_own_gpus(self) -> bool:
        """Whether each engine needs a GPU that nobody else uses, where there are GPUs."""
        return self.transport == "distributed"
