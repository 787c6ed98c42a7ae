"""When a run's checkpoints are written and which of them stay."""

from __future__ import annotations

import shutil

from rl.stack import Stack


def save_checkpoint(stack: Stack, step: int) -> None:
    """Write `checkpoints/step_N`, whole or not at all, then remove all but the newest `checkpoint.keep`."""
    run = stack.run
    digest = stack.spec.numerics_config().spec.digest()
    stack.trainer.save(run.checkpoint(step), {"step": step, "spec_digest": digest})
    for old in run.checkpoint_steps()[: -stack.spec.checkpoint.keep]:
        shutil.rmtree(run.checkpoint(old))
