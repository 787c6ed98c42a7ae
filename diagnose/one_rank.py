"""One rank of the trainer in this process, for what is scored without a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.config import NumericsConfig
from fp8rl.trainer import device
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.distributed.layout import Layout

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer


@contextmanager
def one_rank(config: TrainerSection, numerics: NumericsConfig) -> Iterator[Layout]:
    """Hold the place of a trainer that is alone, on `numerics`; they may carry the reduction order of a larger layout.

    Raises:
        UserError: exact mode, on a machine where a token's result depends on its batch.
    """
    device.start(0, numerics)
    layout = parallel.initialize(config)
    try:
        from fp8rl.trainer.trainer import check_row_invariance  # Megatron is quiet from here on

        if numerics.mode == "exact":
            check_row_invariance()
        yield layout
    finally:
        parallel.shutdown()


@contextmanager
def one_trainer(
    weights: Path,
    numerics: NumericsConfig,
    *,
    micro_batch_tokens: int,
    longest: int,
    adapter: AdapterSection | None = None,
) -> Iterator[Trainer]:
    """Hold a trainer of one rank with these weights, which scores and exports; see `one_rank`. longest: of a row."""
    config = TrainerSection(micro_batch_tokens=micro_batch_tokens)
    with one_rank(config, numerics) as layout:
        from fp8rl.trainer.trainer import Trainer

        yield Trainer(
            weights, config, numerics, layout, seed=0, total_steps=1, max_sequence_length=longest, adapter=adapter
        )
