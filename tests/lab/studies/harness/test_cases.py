"""The metrics of the four cases, by hand."""

import math

import pytest
import torch

from fp8rl.rl.run.batching import SftExample, batch_from_examples
from lab.studies.harness.cases import _metrics


def test_metrics_of_a_token_by_hand() -> None:
    batch = batch_from_examples([SftExample([0], [1])])
    batch = batch.with_fields(rollout_logprobs=torch.tensor([[0.0, math.log(0.3)]]))
    policy, reference = torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[[0.75, 0.25]]]).log()
    found = {name: values[0, 1].item() for name, values in _metrics(policy, reference, batch).items()}
    assert found["kl"] == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), rel=1e-6)
    assert found["abs_d"] == pytest.approx(math.log(5 / 3), rel=1e-6)
    assert found["k3"] == pytest.approx(5 / 3 - 1 - math.log(5 / 3), rel=1e-6)
    assert (found["clip_2"], found["clip_1.2"]) == (0.0, 1.0)
