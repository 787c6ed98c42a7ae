"""One rank of the trainer in this process, for what is scored without a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fp8rl.numerics.config import NumericsConfig
from fp8rl.trainer import device
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.distributed.layout import Layout


@contextmanager
def one_rank(config: TrainerSection, numerics: NumericsConfig) -> Iterator[Layout]:
    """The place of a trainer that is alone, on `numerics`; they may carry the reduction order of a larger layout.

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
