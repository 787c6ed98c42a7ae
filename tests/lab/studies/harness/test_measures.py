"""What studies run, and what they measure, by hand."""

import math

import pytest
import torch

from fp8rl.numerics.quantize import fake_quantize
from fp8rl.rl.experiment import load_experiment
from fp8rl.trainer.distributed.wires import SPECS
from fp8rl.trainer.step.batch import TokenBatch
from lab.studies.adapters import ARMS as ADAPTERS
from lab.studies.benefit import SEEDS, arms, collapsed, jobs
from lab.studies.harness.breakdown import AnswerTokens, bins, rank_correlations
from lab.studies.harness.cases import _metrics
from lab.studies.harness.gradient import turned
from lab.studies.harness.subjects import EXAMPLES
from lab.studies.model_scale import ENTROPY, entropy, expected_abs_d, slope, temperature_for
from lab.studies.pretrained import QUESTIONS, asked
from lab.studies.wire_formats import unscaled


def answers() -> AnswerTokens:
    """Answers of three tokens and of one, whose abs d are 3, 2, 1 and 5."""
    batch = TokenBatch.of([[7, 8], [7]], [[9, 9, 9], [9]])
    logprobs, abs_d = torch.zeros(batch.tokens.shape), torch.zeros(batch.tokens.shape, dtype=torch.float64)
    logprobs[0, 2:5], logprobs[1, 1] = torch.tensor([0.6, 0.6, 1.0]).log(), math.log(0.2)
    abs_d[0, 2:5], abs_d[1, 1] = torch.tensor([3.0, 2.0, 1.0]), 5.0
    return AnswerTokens.of(batch.with_fields(rollout_logprobs=logprobs), abs_d)


def test_tokens_are_binned_by_position_length_and_probability() -> None:
    found = {by: {label: (mean, count) for label, mean, count in rows} for by, rows in bins([answers()] * 2).items()}
    empty = dict.fromkeys(("5 to 8", "9 to 16", "17 to 32"), (0.0, 0))
    assert found["position"] == {"1": (4.0, 4), "2 to 4": (1.5, 4)} | empty
    assert found["length"]["1 to 8"] == (2.75, 8)
    assert (found["probability"]["0.99 to 1"], found["probability"]["0.5 to 0.9"]) == ((1.0, 2), (2.5, 4))


def test_rank_correlations_have_the_sign_of_the_relation() -> None:
    ranks = rank_correlations(answers())
    assert ranks["rank correlation/probability"] == pytest.approx(-3 / math.sqrt(10))  # ranks 3 2 1 4; 2.5 2.5 4 1
    assert ranks["rank correlation/position"] < 0 and ranks["rank correlation/length"] < 0
    alike = AnswerTokens(torch.tensor([1.0, 2.0]), {"length": torch.tensor([4.0, 4.0])})
    assert rank_correlations(alike) == {"rank correlation/length": 0.0}


def test_metrics_of_the_four_cases() -> None:
    batch = TokenBatch.of([[0]], [[1]])
    batch = batch.with_fields(rollout_logprobs=torch.tensor([[0.0, math.log(0.3)]]))
    policy, reference = torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[[0.75, 0.25]]]).log()
    found = {name: values[0, 1].item() for name, values in _metrics(policy, reference, batch).items()}
    assert found["kl"] == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), rel=1e-6)
    assert found["abs_d"] == pytest.approx(math.log(5 / 3), rel=1e-6)
    assert found["k3"] == pytest.approx(5 / 3 - 1 - math.log(5 / 3), rel=1e-6)
    assert (found["clip_2"], found["clip_1.2"]) == (0.0, 1.0)


def test_turning_is_the_angle() -> None:
    east, north = torch.tensor([2.0, 0.0]).double(), torch.tensor([0.0, 5.0]).double()
    for other, angle in ((north, 1.0), (-east, 2.0), (east + 1e-9 * north, (2.5e-9) ** 2 / 2), (east, 0.0)):
        assert turned([east], [other]) == pytest.approx(angle)
    assert turned([east, north], [east, -north]) == pytest.approx(1 - (4 - 25) / 29)


def test_the_expectation_of_abs_d_is_weighted_by_the_rollout() -> None:
    trainer, rollout = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.8, 0.1, 0.1]]).log()
    by_hand = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.25 / 0.1)
    assert expected_abs_d(trainer, rollout) == pytest.approx(by_hand, rel=1e-6)
    assert expected_abs_d(trainer, trainer) == 0


def test_every_model_is_given_the_same_entropy_and_a_power_law_has_its_exponent_as_slope() -> None:
    logits = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    for scale in (0.03, 1.0, 40.0):
        assert entropy(logits * scale / temperature_for(logits * scale)) == pytest.approx(ENTROPY, abs=1e-6)
    assert entropy(torch.zeros(3, 128)) == pytest.approx(math.log(128))
    assert slope([1, 4, 16, 50], [3 * size**0.7 for size in (1, 4, 16, 50)]) == pytest.approx(0.7)


def test_a_collapse_is_a_fall_to_half_of_the_best_so_far() -> None:
    assert collapsed([0.2, 0.8, 0.4]) and collapsed([0.5, 0.9, 0.1, 0.9])
    assert not collapsed([0.2, 0.8, 0.41]) and not collapsed([0.1, 0.3, 0.9]) and not collapsed([0.0, 0.0])


def test_unscaled_gradients_are_plain_fp8_numbers_and_only_within_the_block() -> None:
    x = torch.tensor([[2.0**-11, 1.03, 1000.0]])
    scaled = fake_quantize(x, SPECS["e4m3"])
    with pytest.raises(ZeroDivisionError), unscaled():
        assert fake_quantize(x, SPECS["e4m3"]).tolist() == [[0.0, 1.0, 448.0]]
        assert fake_quantize(x, SPECS["e5m2"])[0, 2] == pytest.approx(1000)
        raise ZeroDivisionError
    assert torch.equal(fake_quantize(x, SPECS["e4m3"]), scaled) and scaled[0, 2] == pytest.approx(1000)


def test_every_arm_is_a_spec_and_runs_have_folders_of_their_own() -> None:
    for settings in (*(given for _, given in arms()), *(arm.settings() for arm in ADAPTERS.values())):
        load_experiment(EXAMPLES / "arithmetic.yaml", [f"{key}={value}" for key, value in settings.items()])
    names = [job.name for job in jobs(range(SEEDS))]
    assert len(names) == len(set(names)) == 80
    assert {job.seed for job in jobs(range(SEEDS))[:16]} == {0}, "one seed of all arms comes first"
    assert sorted(question for seed in range(5) for question in asked(seed)) == sorted(QUESTIONS)
