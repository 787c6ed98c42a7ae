"""The `sync:` section of an experiment spec."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fp8rl.numerics.core.section import Section
from fp8rl.numerics.spec import QuantSpec

ANSWER_WITHIN_S = 600.0


class SyncSection(Section):
    """How weights are sent from the trainer to the engines."""

    transport: Literal["tensor", "distributed", "disk"] = "tensor"
    """How weights reach the engines. `tensor`: memory that is mapped by engines on the trainer's CPU or GPU.
    `distributed`: a broadcast (NCCL, or gloo on a CPU) to engines with their own GPUs. `disk`: safetensors files."""
    pause: Literal["retract", "abort", "in_place"] = "retract"
    """What happens to unfinished answers when weights change. `retract`: they wait, and continue after their prefix is
    prefilled again. `abort`: they are aborted and continued by a new request, which takes a second longer. In both
    modes each token belongs to one weight version. `in_place`: they continue with the KV cache of the old weights, so
    that later tokens depend on old and new weights; native mode only."""
    delta: bool = False
    """Send only bytes that have changed. All bytes are sent if an engine lacks the last version, or if the proof finds
    a difference. Each trainer rank keeps a copy of what it sends."""
    shared_base: bool = False
    """Let engines on the trainer's machine read the frozen weights from the trainer's read-only memory, so that they
    need no copies. The trainer then keeps no BF16 form of quantized weights. This needs `adapter` in mode `separate`
    and, on GPUs, one trainer rank and one engine on the same GPU. Products then read their weights from the codes in
    every call, which costs time on a CPU."""
    canary: bool = True
    """Prove after each sync that each engine computes with the weights that it holds: its log-probabilities of a few
    known tokens are compared with the trainer's. The engine generates meanwhile; its answers are used only after the
    proof. In exact mode an engine that differs is replaced."""
    bucket_mib: int = Field(default=256, ge=1)
    """Size of a send buffer in MiB. A sync uses a few buffers. A larger tensor gets a buffer of its own."""
    answer_within_s: float = Field(default=ANSWER_WITHIN_S, ge=1.0)
    """Timeout in seconds of an engine's response to one message of a sync. Without it, a sync over a connection that
    broke silently would wait forever."""

    @property
    def engines_own_gpus(self) -> bool:
        """True if each engine needs a GPU of its own, on a machine with GPUs."""
        return self.transport == "distributed"


def reason_to_send(transport: str, engine_ranks: int, served: QuantSpec, trained: QuantSpec) -> str | None:
    """Return the reason why engines cannot read frozen weights in the trainer's memory; None if they can.

    served, trained: the specs that the two sides compute in.
    """
    if transport != "tensor":
        return f"sync.transport is {transport}: engines do not map memory of the trainer"
    if served != trained:
        return "trainer and engine compute in different specs"
    if served.quantized and served.weight.granularity != "block":
        return f"weights are quantized by {served.weight.granularity}; only blocks have one layout on both sides"
    if engine_ranks > 1:
        return f"an engine of {engine_ranks} ranks holds parts of tensors"
    return None
