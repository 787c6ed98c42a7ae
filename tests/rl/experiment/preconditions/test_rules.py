"""Rules of a spec, its model's sizes and the machines that it is for: every spec that is shipped keeps them."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from fp8rl.diagnose.plan.subject import read_plan_subject
from fp8rl.models.shape import Shape
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.budget.job import GPUS, GPUS_PER_NODE, gpu_named
from fp8rl.rl.experiment.preconditions.rules import Target, check_target, engine_ranks
from tests.support.experiments import experiment
from tests.support.paths import EXAMPLES, REAL_SPECS, ROOT, SPECS
from tests.support.preconditions import on

NUMBERS = {"one": 1, "eight": 8, "sixteen": 16}
KINDS = {"gsm8k": "h200", **REAL_SPECS}
NEEDS = {name: [f"model.path={EXAMPLES / 'models/tiny_qwen3_moe'}"] for name in ("calculator", "tool_calls")}


def gpus_of_header(text: str) -> int:
    """The GPUs that the lines before a spec name: `on eight GPUs`, `64 GPUs of 141 GB train, 32 serve`."""
    header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    count, serve = re.search(r"(\w+) GPUs?\b", header), re.search(r"\btrain, (\d+) serve", header)
    if count is None:
        return 0
    word = count[1].lower()
    return (NUMBERS[word] if word in NUMBERS else int(word)) + (int(serve[1]) if serve else 0)


def check_on(spec: Experiment, shape: Shape, kind: str | None, gpus: int) -> None:
    """The rules, and whether the GPUs are enough: one for each rank, which an engine of one rank may share."""
    check_target(spec, shape, on(kind))
    left, widths = gpus - spec.trainer.world_size, spec.engine_ranks
    apart = spec.sync.engines_own_gpus or max(widths, default=1) > 1
    assert not gpus or left >= (sum(widths) if apart else max(0, len(widths) - spec.trainer.world_size))
    assert gpus <= GPUS_PER_NODE or not widths or spec.sync.transport != "tensor"
    assert not gpus or not left or not spec.rollout.sleep


@pytest.mark.slow
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_example_is_accepted_on_the_machines_that_its_header_names(path: Path) -> None:
    example = path.stem
    gpus = gpus_of_header(path.read_text())
    assert bool(gpus) is (example in KINDS)
    subject = read_plan_subject(str(path), NEEDS.get(example, []))
    check_on(subject.experiment, subject.shape, KINDS[example] if gpus else None, gpus)


def launched(name: str) -> tuple[list[str], int]:
    """The words that follow `fp8rl train` in a launch template, and the GPUs of all its nodes."""
    values = yaml.safe_load((ROOT / "examples/launch" / name).read_text())
    if "entrypoint" in values.get("spec", {}):
        node = values["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        gpus, nodes = int(node["resources"]["limits"]["nvidia.com/gpu"]), 2
        words = values["spec"]["entrypoint"].partition("fp8rl train ")[2]
    else:
        gpus, nodes = int(values["resources"]["accelerators"].partition(":")[2]), values["num_nodes"]
        words = values["envs"]["SPEC"] + values["run"].partition('"$SPEC"')[2]
    return shlex.split(words), gpus * nodes


@pytest.mark.parametrize("template", ["kuberay.yaml", "skypilot.yaml"])
def test_every_launch_template_starts_a_spec_that_its_machines_accept(template: str) -> None:
    (spec, *overrides), gpus = launched(template)
    subject = read_plan_subject(str(ROOT / spec), overrides)
    check_on(subject.experiment, subject.shape, "h100", gpus)


def test_a_cluster_that_is_not_ours_is_looked_at_when_the_run_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not Target.here().known
    wide = experiment(numerics={"mode": "native"}, rollout={"tp": 2})
    check_target(wide, read_plan_subject("qwen3_8b").shape, Target.here())
    (refusal,) = engine_ranks(wide, gpus=False)
    assert "rollout.tp: found '2 with numerics.mode=native on CPUs'" in str(refusal)


def test_a_gpu_is_found_by_the_names_that_people_and_drivers_write() -> None:
    of_drivers = {"h100": "NVIDIA H100 PCIe", "b300": "NVIDIA B300 SXM6 AC", "4090": "NVIDIA GeForce RTX 4090"}
    of_drivers["rtx pro 6000"] = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    for key, gpu in GPUS.items():  # `doctor` gives the second one to `plan`
        assert gpu_named(of_drivers.get(key, key)) is gpu_named(gpu.name.lower().replace(" ", "-")) is gpu
    with pytest.raises(UserError, match="A100-SXM4-40GB"):  # half of the memory of the one that is known
        gpu_named("NVIDIA A100-SXM4-40GB")
