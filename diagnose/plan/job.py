"""What is planned: a model, a layout, numerics and a batch, on GPUs of one kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.shape import Shape
from numerics.config import NumericsConfig
from trainer.config import TrainerConfig
from trainer.state_bytes import Storage


@dataclass(frozen=True)
class Job:
    """A training step of one trainer, and the engines beside it.

    Attributes:
        shape: of the model. layout: of the trainer. numerics: of both sides.
        storage: form in which the trainer keeps quantized weights.
        rows, length: answers of a step, and tokens of each, prompt included.
        engines, engine_tp: their number and ranks. kv_tokens: that the KV cache of one holds.
        bucket_bytes: of a sync.
        recompute: activations of a layer are computed again in the backward. offload: masters and moments on the host.
        sleep: of trainer and engine on one GPU, one leaves it while the other works.
        moment_bytes: of one of Adam's two, 4 or 2.
    """

    shape: Shape
    layout: TrainerConfig
    numerics: NumericsConfig
    storage: Storage
    rows: int
    length: int
    engines: int = 1
    engine_tp: int = 1
    kv_tokens: int = 32768
    bucket_bytes: int = 256 << 20
    recompute: bool = False
    offload: bool = False
    sleep: bool = False
    moment_bytes: int = 4

    @property
    def fp8(self) -> bool:
        """Whether the trainer multiplies in FP8."""
        return self.numerics.trainer_spec.quantized

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length

    @property
    def micro_batch(self) -> int:
        """Tokens of one micro-batch: whole rows, as many as `micro_batch_tokens` allow, and one at least."""
        rows = max(1, self.layout.micro_batch_tokens // self.length)
        return min(rows, -(-self.rows // self.layout.dp)) * self.length

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, in each data-parallel replica."""
        return -(-self.tokens // (self.layout.dp * self.micro_batch))

    def in_bf16(self) -> Job:
        """The same with a BF16 trainer and a BF16 engine."""
        numerics = replace(self.numerics, trainer="bf16", rollout="bf16")
        return replace(self, numerics=numerics)

    def of_tokens(self, tokens: int) -> Job:
        """The same with about so many tokens in a step, in one micro-batch of each replica while these are small."""
        share = max(1, tokens // self.layout.dp)
        if share < self.length:
            return replace(self, rows=self.layout.dp, length=share)
        return replace(self, rows=self.layout.dp * (share // self.length))
