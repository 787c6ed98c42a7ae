import math
import pickle

import pytest
import torch

from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.step.batch import TokenBatch


def make_batch() -> TokenBatch:
    return TokenBatch(
        tokens=torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]]),
        lengths=torch.tensor([4, 3]),
        loss_mask=torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]], dtype=torch.bool),
    )


def test_loss_entropy_and_gradient_by_hand() -> None:
    # Targets have logprobs -1, -2 and -6: the mean negative log-likelihood is 9 / 3 = 3. Entropies 1, 2, 3: mean 2.
    logprobs = torch.tensor([[-9.0, -9, -1, -2], [-9, -6, -9, -9]], requires_grad=True)
    entropy = torch.tensor([[7.0, 7, 1, 2], [7, 3, 7, 7]])
    output = SftObjective.of(make_batch())(logprobs, entropy, make_batch())
    output.loss.backward()

    assert output.loss.item() == 3.0
    assert output.metrics["train/entropy"].item() == 2.0
    third = pytest.approx(-1 / 3)
    assert logprobs.grad.tolist() == [[0, 0, third, third], [0, third, 0, 0]]


def test_micro_batches_add_up_with_the_global_denominator() -> None:
    batch = make_batch()
    logprobs = torch.tensor([[-9.0, -9, -1, -2], [-9, -6, -9, -9]])
    objective = SftObjective.of(batch)
    parts = []
    for row in range(2):
        part = batch.select([row])
        parts.append(objective(logprobs[row : row + 1, : part.width], torch.zeros(1, part.width), part).loss.item())
    assert parts == [1.0, 2.0]  # (1 + 2) / 3 and 6 / 3, not each row's own mean


def test_values_outside_the_mask_do_not_matter() -> None:
    logprobs = torch.tensor([[math.nan, math.nan, -1, -2], [math.nan, -6, math.nan, -math.inf]], requires_grad=True)
    output = SftObjective.of(make_batch())(logprobs, torch.zeros(2, 4), make_batch())
    output.loss.backward()
    assert output.loss.item() == 3.0
    assert torch.isfinite(logprobs.grad).all()


def test_a_batch_without_targets_is_refused() -> None:
    batch = TokenBatch(torch.tensor([[1, 2]]), torch.tensor([2]), torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="no target token"):
        SftObjective.of(batch)


def test_objective_travels_to_other_processes() -> None:
    objective = SftObjective.of(make_batch())
    assert pickle.loads(pickle.dumps(objective)) == objective
