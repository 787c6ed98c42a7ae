"""The sum that `train` goes by on a machine's GPUs, of which torch says what these tests say."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8rl.diagnose.doctor import memory
from fp8rl.models import read_shape
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment, load_experiment
from fp8rl.rl.experiment.budget.fit import fullest, own_gpu, planned_here, with_own_cache
from fp8rl.rl.experiment.budget.memory import RUNTIME_BYTES, colocated_memory
from fp8rl.rl.experiment.preconditions import resources
from fp8rl.rl.experiment.preconditions.resources import check_memory
from fp8rl.weight_sync.served import served_bytes
from tests.support.paths import CONFIGS, EXAMPLES

H100, H200 = ("NVIDIA H100 80GB HBM3", 79 << 30), ("NVIDIA H200", 139 << 30)
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Has torch show so many GPUs of a kind, in a host of 2 TB."""
    device = namedtuple("device", "name total_memory major minor", defaults=(9, 0))
    monkeypatch.setattr(resources, "available_memory", lambda: 2 << 40)

    def shown(kind: tuple[str, int], count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device(*kind))

    return shown


def checked(example: str, *overrides: str) -> Experiment:
    experiment = load_experiment(EXAMPLES / f"planned/{example}.yaml", overrides)
    model = example.removesuffix("_one_gpu").removesuffix("_lora")
    check_memory(read_shape(CONFIGS / model, adapter=experiment.adapter), experiment)
    return experiment


@pytest.mark.slow
def test_specs_for_real_models_are_let_through_on_their_gpus(machine: Machine) -> None:
    machine(H100, 1)
    checked("qwen3_4b_one_gpu")
    checked("qwen3_4b_lora_one_gpu")
    checked("qwen3_30b_a3b_lora_one_gpu")
    with pytest.raises(UserError, match="found '1[0-9]{2}.. GB on the GPU of rank 0"):
        checked("qwen3_30b_a3b_lora_one_gpu", "sync.shared_base=false")
    machine(H200, 8)
    checked("qwen3_30b_a3b")


def test_a_base_that_is_read_by_both_sides_is_counted_once_and_before_it_two_placeholders(machine: Machine) -> None:
    machine(H100, 1)
    gpu, experiment = own_gpu(), load_experiment(EXAMPLES / "planned/qwen3_4b_lora_one_gpu.yaml")
    shared = experiment.model_copy(update={"sync": experiment.sync.model_copy(update={"shared_base": True})})
    shape = read_shape(CONFIGS / "qwen3_4b", adapter=experiment.adapter)
    one, two = (colocated_memory(planned_here(shape, each, gpu)[0]).held for each in (shared, experiment))
    machine(H100, 2)
    apart = [planned_here(shape, each, gpu)[1] for each in (shared, experiment)]
    assert apart == [False, True], "a base and its engine are on one GPU, however many are left"
    adapters = 2 * sum(math.prod(row.shape) for row in shape.adapters)
    assert one["dense parameters"]["train"] == adapters and "dense operands" not in one
    assert two["dense parameters"]["train"] == adapters + 2 * shape.parameters
    served = served_bytes(shape, experiment.numerics_config().rollout_spec)
    rows, ranks = (32 + 2 * 8) * 128, 3 * 32  # q, k and v together; gate and up
    wide = 36 * (rows * ranks + 2 * 9728 * 2 * 32) * 2
    assert one["engine weights"]["train"] == adapters + wide and one["base"]["train"] == served
    assert two["engine weights"]["train"] == served + adapters + wide and "base" not in two
    asleep = colocated_memory(replace(planned_here(shape, shared, gpu)[0], sleep=True)).held
    assert "train" not in asleep["engine weights"] and asleep["base"] == one["base"], "the trainer reads it"
    embedding = 2 * 151936 * 2560
    assert one["placeholders"] == {"sync": 2 * embedding}
    assert one["operands of a call"] == {"train": 2 * 9728 * 2560}, "the transposed codes of gate and up"


@pytest.mark.parametrize(
    ("example", "kind", "count", "override", "said"),
    [
        ("qwen3_30b_a3b", H200, 8, "trainer.recompute=none", "trainer.recompute: found .* which activations 231.1 GB"),
        ("qwen3_30b_a3b", H100, 8, "trainer.optimizer.offload=false", "rollout.sleep: .*engine weights 31.2 GB"),
        ("qwen3_30b_a3b", H200, 8, "rollout.max_total_tokens=4000000", "rollout.max_total_tokens: .*KV cache 393.2 GB"),
        ("qwen3_4b_one_gpu", H100, 1, "rollout.memory_fraction=0.1", "rollout.memory_fraction: .*workspace 76.0 GB"),
        ("qwen3_4b_one_gpu", ("A100", 40 << 30), 1, "rollout.group_size=8", "the 42.9 GB of a A100"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_class_and_key(
    example: str, kind: tuple[str, int], count: int, override: str, said: str, machine: Machine
) -> None:
    machine(kind, count)
    with pytest.raises(UserError, match=said):
        checked(example, override)


def test_a_cache_that_the_spec_leaves_open_is_as_large_as_the_gpu_allows(machine: Machine) -> None:
    experiment = load_experiment(EXAMPLES / "arithmetic.yaml")
    assert with_own_cache(experiment) is experiment and experiment.rollout.cache_tokens == 32768, "on a CPU"
    machine(H100, 1)
    rows = experiment.rollout.prompts_per_step * experiment.rollout.group_size
    assert with_own_cache(experiment).rollout.max_total_tokens == rows * experiment.rollout.context_length
    path = [f"model.path={CONFIGS / 'qwen3_4b'}"]
    gpu, large = own_gpu(), load_experiment(EXAMPLES / "planned/qwen3_4b_one_gpu.yaml", path)
    job, apart = planned_here(read_shape(CONFIGS / "qwen3_4b"), large, gpu)
    assert not apart and large.rollout.context_length < job.kv_tokens < 256 * large.rollout.context_length
    machine(H100, 2)
    alone, apart = planned_here(read_shape(CONFIGS / "qwen3_4b"), large, gpu)
    assert apart and alone.kv_tokens > job.kv_tokens
    assert memory(large).found == f"{fullest(alone, apart).peak / 1e9:.1f} of 85 GB on the fullest {H100[0]}"


ASLEEP = ("rollout.sleep=true", "trainer.optimizer.offload=false")


def test_turns_let_a_spec_fit_whose_sides_do_not_fit_beside_each_other(machine: Machine) -> None:
    """The peak is the larger of two turns."""
    smaller = ("X", 112 << 30)
    machine(smaller, 8)
    with pytest.raises(UserError, match="found '144.8 GB on the GPU of rank 0"):
        checked("qwen3_30b_a3b", ASLEEP[1])
    checked("qwen3_30b_a3b", *ASLEEP)
    with pytest.raises(UserError, match="rollout.sleep: found 'true with 9 GPUs for 8 trainer rank"):
        machine(smaller, 9)
        checked("qwen3_30b_a3b", *ASLEEP)


@pytest.mark.parametrize(("kind", "overrides", "bytes_each"), [(H100, (), 16), (H200, ASLEEP, 12)])
def test_offloading_and_turns_take_memory_of_the_host(
    kind: Any, overrides: Any, bytes_each: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters and moments are 12 bytes a parameter, gradients 4."""
    machine(kind, 1)
    needed = bytes_each * 4_022_468_096 + resources.RANK_BYTES + resources.ENGINE_BYTES
    monkeypatch.setattr(resources, "available_memory", lambda: needed)
    checked("qwen3_4b_one_gpu", *overrides)
    monkeypatch.setattr(resources, "available_memory", lambda: needed - 1)
    with pytest.raises(UserError, match="trainer.dp: found 1, expected processes that fit the free memory"):
        checked("qwen3_4b_one_gpu", *overrides)


TAUGHT = ("algorithm.name=opd", "rollout.temperature=1", "eval.problems=0", "model.path=m", "teacher.path=t")


def test_a_teacher_on_the_one_gpu_is_counted_or_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8rl.rl.experiment.budget import fit

    size = {"t": "qwen3_4b"}
    monkeypatch.setattr(fit, "read_shape", lambda path, key="": read_shape(CONFIGS / size[path.name]))
    machine(H100, 1)
    alone, taught = checked("qwen3_4b_one_gpu"), checked("qwen3_4b_one_gpu", *TAUGHT)
    gpu, policy = own_gpu(), read_shape(CONFIGS / "qwen3_4b")
    (less, _), (job, _) = planned_here(policy, alone, gpu), planned_here(policy, taught, gpu)
    held = colocated_memory(replace(job, kv_tokens=less.kv_tokens)).in_phase("train")
    assert job.teacher is not None and taught.teacher is not None
    weights = served_bytes(read_shape(CONFIGS / "qwen3_4b"), taught.numerics_config().rollout_spec)
    cache = 32768 * read_shape(CONFIGS / "qwen3_4b").kv_bytes()
    assert held - colocated_memory(less).in_phase("train") == weights + cache + job.teacher.graphs + RUNTIME_BYTES
    machine(H100, 2)
    with_own, apart = planned_here(policy, taught, own_gpu())
    assert apart and with_own.teacher is not None, "the policy's engine takes the second GPU"
    assert fullest(with_own, apart).peak < fullest(job, apart=False).peak
    machine(H100, 3)
    assert planned_here(policy, taught, own_gpu())[0].teacher is None
    machine(H100, 1)
    size["t"] = "qwen3_30b_a3b"
    with pytest.raises(UserError, match="teacher.path: found .* of which teacher's weights .* Take a smaller teacher"):
        checked("qwen3_4b_one_gpu", *TAUGHT)
