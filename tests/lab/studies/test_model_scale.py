"""The measures of the study of model scale, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lab.studies.model_scale import AXES, BASE, ENTROPY, GROWING, entropy, expected_abs_d, slope, temperature_for


def test_the_expectation_of_abs_d_is_weighted_by_the_rollout() -> None:
    trainer, rollout = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.8, 0.1, 0.1]]).log()
    by_hand = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.25 / 0.1)
    assert expected_abs_d(trainer, rollout) == pytest.approx(by_hand, rel=1e-6)
    assert expected_abs_d(trainer, trainer) == 0


def test_thetemperature_for_gives_every_model_the_same_entropy() -> None:
    logits = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    for scale in (0.03, 1.0, 40.0):
        assert entropy(logits * scale / temperature_for(logits * scale)) == pytest.approx(ENTROPY, abs=1e-6)
    assert entropy(torch.zeros(3, 128)) == pytest.approx(math.log(128))


def test_a_power_law_has_its_exponent_as_slope() -> None:
    sizes = [1, 4, 16, 50]
    assert slope(sizes, [3 * size**0.7 for size in sizes]) == pytest.approx(0.7)


def test_models_grow_in_one_thing_alone() -> None:
    for axis, shapes in AXES.items():
        sizes = [getattr(shape, axis) for shape in shapes]
        assert sizes == sorted(set(sizes))
        others = {name for name in vars(BASE) if name not in (axis, "intermediate" if axis == "hidden" else axis)}
        assert all(getattr(shape, name) == getattr(BASE, name) for shape in shapes for name in others)
    assert BASE in GROWING
