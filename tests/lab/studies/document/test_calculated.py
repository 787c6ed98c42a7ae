"""What calculation says to the claims of the source documents, and what its times of a step must show."""

from __future__ import annotations

import pytest

from fp8rl.diagnose.plan.subject import CONFIGS
from fp8rl.models import read_shape
from fp8rl.rl.experiment.budget.job import Job
from fp8rl.trainer.config import TrainerSection
from lab.studies.document.calculated import NATIVE, answers, deepseek_on_h800, on_h200, products_share_of_ironwood
from lab.studies.document.step_time import FAST, PEAKS, SLOW, Bracket, fp8_over_bf16, step_time

QWEN = read_shape(CONFIGS / "qwen3_30b_a3b")


def test_every_claim_that_can_be_calculated_has_a_figure_and_a_verdict() -> None:
    found = {answer.id: answer for answer in answers()}
    assert all(answer.figure and any(letter.isdigit() for letter in answer.figure) for answer in found.values())
    table = "FP8 weights 671 GB, BF16 shadow 1.34 TB, FP32 masters 2.68 TB, m and v 5.37 TB, BF16 gradients 1.34 TB"
    assert found["002-22"].figure == table + ": 11.4 TB" and found["002-22"].verdict == "confirmed"
    assert "7.9 GB" in found["002-23"].figure and "11.1 GB" in found["002-23"].figure
    assert found["002-23"].verdict == "contradicted"
    assert "1.277" in found["000-13"].figure and "43%" in found["000-13"].figure
    assert "8.72 TB" in found["002-17"].figure


def tokens_per_gpu(job: Job, gpu: str) -> Bracket:
    rates = (SLOW, FAST)
    return Bracket(*(job.tokens / step_time(job, PEAKS[gpu], each).total / job.layout.world_size for each in rates))


def qwen(rows: int, **layout: int) -> Job:
    config = TrainerSection(micro_batch_tokens=8192, **layout)
    return Job(QWEN, config, NATIVE, "transformer_engine", rows, 8192).in_bf16()


@pytest.mark.parametrize(
    ("layout", "rows", "found"), [({"pp": 2, "ep": 8, "dp": 8}, 128, 6325), ({"pp": 4, "ep": 4, "dp": 4}, 256, 6244)]
)
def test_published_steps_of_qwen3_30b_on_16_h800_lie_between_the_corners(
    layout: dict[str, int], rows: int, found: int
) -> None:
    """alibaba/Pai-Megatron-Patch#643: BF16, one row of 8,192 tokens a micro-batch, nothing recomputed."""
    assert tokens_per_gpu(qwen(rows, **layout), "h800").holds(found)


def test_deepseek_v3s_own_pretraining_lies_between_the_corners() -> None:
    """272.8 G tokens a day on 2,048 H800, in FP8."""
    assert tokens_per_gpu(deepseek_on_h800(), "h800").holds(272.8e9 / 86400 / 2048)


def test_fp8_is_slower_for_qwen3_30b_on_8_h200_at_small_steps() -> None:
    """As reported of whole runs (verl#7232)."""
    small = fp8_over_bf16(on_h200(512, 8), PEAKS["h200"])
    assert small.low > 1
    large = fp8_over_bf16(on_h200(4096, 1024), PEAKS["h200"])
    assert large.low < 0.9 < large.high


def test_ironwoods_speed_up_is_43_percent_of_the_step_in_products() -> None:
    share = products_share_of_ironwood()
    assert share == pytest.approx(0.43, abs=0.005)
    assert 1 / (1 - share / 2) == pytest.approx(1.277, abs=0.001)
    # Of DeepSeek-V3's FLOPs, at the chip's BF16 peak and at half of it: the share of products lies between.
    shape = read_shape(CONFIGS / "deepseek_v3")
    at_peak = 2590 * 6 * shape.active_parameters / 2307e12
    assert at_peak < share < 2 * at_peak
