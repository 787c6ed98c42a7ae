"""The peak of a real step on a CPU, as torch's allocator counts it, against the calculation."""

import pytest
import torch

from fp8rl.models import read_shape
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment.budget.job import Job
from fp8rl.rl.experiment.budget.memory import CPU_PROCESS_BYTES, peak_on_a_cpu, trainer_state
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import write_model

ROWS, LENGTH = 64, 32
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("moe", "mode", "precision"),
    [(True, "exact", "fp8"), (False, "exact", "bf16"), (True, "native", "fp8"), (False, "native", "bf16")],
)
def test_a_step_holds_at_its_peak_what_is_calculated(moe, mode, precision, layout, tmp_path) -> None:
    from fp8rl.trainer.trainer import Trainer

    config = TrainerSection(micro_batch_tokens=ROWS * LENGTH)
    numerics = NumericsConfig(mode=mode, spec=QuantSpec.preset("fp8_block_pow2"), trainer=precision)
    path = write_model(tmp_path / "model", moe=moe)
    trainer = Trainer(TrainerSpec(path, config, numerics, 0, 9, LENGTH), layout)
    for seed in range(2):  # the first one compiles
        batch = random_batch(rows=ROWS, longest=LENGTH, seed=seed)
        batch.lengths.fill_(LENGTH)
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            trainer.train_step(batch, cross_entropy(batch))
    job = Job(read_shape(path), config, numerics, "torch", ROWS, LENGTH)
    held = sum(state.total for state in trainer_state(job, 0).values())
    tensors, process = peak_on_a_cpu(job)
    assert held + _peak(profile) == pytest.approx(tensors, rel=0.1) and process - tensors == CPU_PROCESS_BYTES


def _peak(profile) -> int:
    """Bytes alive at a time beside those of before."""
    changes = [
        (event.start_ns(), event.nbytes()) for event in profile.kineto_results.events() if event.name() == "[memory]"
    ]
    alive = peak = 0
    for _, change in sorted(changes):
        alive += change
        peak = max(peak, alive)
    return peak
