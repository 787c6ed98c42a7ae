"""Rules of a spec, its model's sizes and the machines that it is for: every spec that is shipped keeps them."""

import dataclasses
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8rl.diagnose.plan.subject import read_plan_subject
from fp8rl.models.shape import Shape
from fp8rl.numerics.core.errors import Rule, UserError
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.budget.gpus import GPUS, GPUS_PER_NODE, gpu_named
from fp8rl.rl.experiment.preconditions.rules import (
    CONTEXT,
    DEEPGEMM,
    ENGINE_RANKS,
    KERNELS,
    LAYOUT,
    NATIVE_PRODUCTS,
    SLEEPERS,
    check_target,
)
from fp8rl.rl.experiment.preconditions.target import PlannedRun, Target
from fp8rl.rl.run.cluster.placement import Node, place
from tests.support.experiments import experiment
from tests.support.paths import EXAMPLES, REAL_SPECS, ROOT
from tests.support.remedies import mended, overridden
from tests.support.tiny_model import TinyModel, write_tiny_model

NUMBERS = {"one": 1, "eight": 8, "sixteen": 16}
KINDS = {"gsm8k": "h200", **REAL_SPECS}
NEEDS = {name: [f"model.path={EXAMPLES / 'models/tiny_qwen3_moe'}"] for name in ("calculator", "tool_calls")}


def on(gpu: str | None) -> Target:
    return Target(gpu is not None, gpu is not None, capability=gpu_named(gpu).capability if gpu else None)


def gpus_of_header(text: str) -> int:
    """The GPUs that the lines before a spec name: `on eight GPUs`, `64 GPUs of 141 GB train, 32 serve`."""
    header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    count, serve = re.search(r"(\w+) GPUs?\b", header), re.search(r"\btrain, (\d+) serve", header)
    if count is None:
        return 0
    word = count[1].lower()
    return (NUMBERS[word] if word in NUMBERS else int(word)) + (int(serve[1]) if serve else 0)


def cluster_of(gpus: int) -> list[Node]:
    if not gpus:
        return [Node("a", "10.0.0.1")]
    parts = [min(GPUS_PER_NODE, gpus - first) for first in range(0, gpus, GPUS_PER_NODE)]
    return [Node(str(index), f"10.0.0.{index}", part) for index, part in enumerate(parts, start=1)]


def check_and_place(spec: Experiment, shape: Shape, target: Target, nodes: list[Node]) -> None:
    check_target(spec, shape, target)
    place(nodes, spec)


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
def test_every_example_is_accepted_on_the_machines_that_its_header_names(example: str) -> None:
    path = EXAMPLES / f"{example}.yaml"
    gpus = gpus_of_header(path.read_text())
    assert bool(gpus) is (example in KINDS)
    subject = read_plan_subject(str(path), NEEDS.get(example, []))
    target = on(KINDS[example] if gpus else None)
    check_and_place(subject.experiment, subject.shape, target, cluster_of(gpus))


def launched(name: str) -> tuple[list[str], list[Node]]:
    """The words that follow `fp8rl train` in a launch template, and its nodes."""
    values = yaml.safe_load((ROOT / "examples/launch" / name).read_text())
    if "entrypoint" in values.get("spec", {}):
        node = values["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        gpus, nodes = int(node["resources"]["limits"]["nvidia.com/gpu"]), 2
        words = values["spec"]["entrypoint"].partition("fp8rl train ")[2]
    else:
        gpus, nodes = int(values["resources"]["accelerators"].partition(":")[2]), values["num_nodes"]
        words = values["envs"]["SPEC"] + values["run"].partition('"$SPEC"')[2]
    return shlex.split(words), cluster_of(gpus * nodes)


@pytest.mark.parametrize("template", ["kuberay.yaml", "skypilot.yaml"])
def test_every_launch_template_starts_a_spec_that_its_machines_accept(template: str) -> None:
    (spec, *overrides), nodes = launched(template)
    subject = read_plan_subject(str(ROOT / spec), overrides)
    check_and_place(subject.experiment, subject.shape, on("h100"), nodes)


NATIVE, FP32 = {"mode": "native"}, "numerics.preset=fp8_block_fp32"
Broken = tuple[str, str | None, str, list[str], list[str]]

# Of each rule, in its order: the model, the GPU, what is found, the overrides that break it, a way out in words alone.
RULES: list[tuple[Sequence[Rule[Any]], list[Broken]]] = [
    (DEEPGEMM, [("qwen3_8b", "b200", "'true, and no Hopper GPU", ["numerics.deepgemm=true"], [])]),
    (
        ENGINE_RANKS,
        [
            ("qwen3_8b", "h200", "'8 with numerics.mode=exact on GPUs'", ["rollout.tp=8"], []),
            (
                "qwen3_8b",
                None,
                "'2 with numerics.mode=native on CPUs'",
                ["numerics.mode=native", "algorithm={name: opd}", "teacher={path: /t, tp: 2}"],
                [],
            ),
        ],
    ),
    (
        SLEEPERS,
        [
            (
                "qwen3_8b",
                "h200",
                "'true with rollout.tp=2 on GPUs'",
                ["numerics.mode=native", "rollout.tp=2", "rollout.sleep=true"],
                [],
            )
        ],
    ),
    (
        KERNELS,
        [
            ("moonlight_16b_a3b", "4090", "'exact with latent attention on GPUs of compute capability 8.9'", [], []),
            ("qwen3_8b", "h100", "'mxfp8 with numerics.mode=exact on GPUs'", ["numerics.preset=mxfp8"], []),
            ("qwen3_8b", "a100", "'exact on GPUs of compute capability 8.0'", [], []),
        ],
    ),
    (
        NATIVE_PRODUCTS,
        [
            (
                "qwen3_8b",
                "a100",
                "'fp8 with numerics.mode=native on GPUs of compute capability 8.0'",
                ["numerics.mode=native", "numerics.trainer=bf16"],
                [],
            ),
            (
                "qwen3_8b",
                "h100",
                "'fp8 with numerics.mode=native on GPUs of compute capability 9.0'",
                ["numerics={mode: native, preset: mxfp8, rollout: bf16}"],
                [],
            ),
            (
                "qwen3_8b",
                "l40s",
                "'fp8 with numerics.mode=native on GPUs of compute capability 8.9'",
                ["numerics.mode=native"],
                [],
            ),
            ("qwen3_8b", "b200", "'FP32 scales with numerics.mode=native", ["numerics.mode=native", FP32], []),
        ],
    ),
    (
        LAYOUT,
        [
            (
                "qwen3_30b_a3b",
                None,
                "'2 with numerics.router_replay=record'",
                ["trainer.pp=2", "numerics.router_replay=record"],
                [],
            ),
            ("qwen3_8b", None, "'replay'", ["numerics.router_replay=replay"], []),
        ],
    ),
    (
        CONTEXT,
        [
            ("qwen3_8b", None, "9999999", ["rollout.context_length=9999999"], []),
            (
                "qwen3_8b",
                None,
                "512",
                ["rollout.context_length=512", "rollout.max_new_tokens=512"],
                ["rollout.max_new_tokens=511", "rollout.context_length=1024"],
            ),
            (
                "qwen3_8b",
                None,
                "100",
                ["rollout.context_length=512", "rollout.max_new_tokens=64", "rollout.max_total_tokens=100"],
                ["rollout.max_total_tokens=512", "rollout={context_length: 100, max_new_tokens: 50}"],
            ),
        ],
    ),
]


@pytest.mark.parametrize(
    ("rule", "model", "gpu", "found", "overrides", "in_words"),
    [(rule, *case) for rules, cases in RULES for rule, case in zip(rules, cases, strict=True)],
)
def test_what_a_kind_of_machine_cannot_run_is_refused_and_its_remedy_mends(
    rule: Rule[Any], model: str, gpu: str | None, found: str, overrides: list[str], in_words: list[str]
) -> None:
    shape = read_plan_subject(model).shape

    def refusal(spec: Experiment) -> UserError | None:
        subject = (spec, gpu is not None) if rule in ENGINE_RANKS else PlannedRun(spec, shape, on(gpu))
        return rule.refusal(subject)

    spec = overridden(overrides)
    with pytest.raises(UserError) as refused:
        check_target(spec, shape, on(gpu))
    error = refused.value
    assert str(refusal(spec)) == str(error) and "\n" not in str(error)
    assert error.found.startswith(found) and error.key and error.expected and error.remedy.endswith(".")
    ways = [*mended(error.remedy, overrides), *([*overrides, way] for way in in_words)]
    assert ways
    for way in ways:
        assert refusal(overridden(way)) is None


@pytest.mark.parametrize(
    ("target", "sections", "said"),
    [
        (
            on("rtx pro 6000"),
            {},
            "numerics.mode: found 'exact on GPUs of compute capability 12.0', expected 8.9 to 11.x",
        ),
    ],
)
def test_what_else_it_cannot_run_is_refused(target: Target, sections: dict, said: str) -> None:
    with pytest.raises(UserError) as error:
        check_target(experiment(**sections), read_plan_subject("qwen3_8b").shape, target)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("gpu", "sections"),
    [
        ("a100", {"numerics": NATIVE | {"trainer": "bf16", "rollout": "bf16"}}),
        ("4090", {}),
        ("h20", {"numerics": {"deepgemm": True}}),
        ("rtx pro 6000", {"numerics": NATIVE}),
        ("b300", {}),
        ("b300", {"numerics": NATIVE}),
    ],
)
def test_what_it_can_run_is_accepted(gpu: str, sections: dict) -> None:
    check_target(experiment(**sections), read_plan_subject("qwen3_8b").shape, on(gpu))


def test_a_cluster_that_is_not_ours_is_looked_at_when_the_run_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not Target.here().known
    wide = experiment(numerics=NATIVE, rollout={"tp": 2})
    check_target(wide, read_plan_subject("qwen3_8b").shape, Target.here())
    with pytest.raises(UserError, match=r"rollout\.tp: found '2 with numerics\.mode=native on CPUs'"):
        place(cluster_of(0), wide)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("H100", "h100"),
        ("NVIDIA H100 80GB", "h100"),
        ("rtx_pro_6000", "rtx pro 6000"),
        ("RTX-PRO-6000", "rtx pro 6000"),
        ("pro6000", "rtx pro 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx pro 6000"),
        ("rtx4090", "4090"),
        ("RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("geforce_rtx_4090", "4090"),
        ("L40S", "l40s"),
        ("a100-sxm4-80gb", "a100"),
    ],
)
def test_a_gpu_is_found_by_the_names_that_people_write(name: str, key: str) -> None:
    assert gpu_named(name) is GPUS[key]


def test_a_name_of_several_words_without_quotes_is_answered_with_how_to_write_it() -> None:
    with pytest.raises(UserError, match="--gpu rtx-pro-6000"):
        gpu_named("rtx")


def test_expandable_segments_are_refused_on_gpus() -> None:
    spec, shape = experiment(), read_plan_subject("qwen3_8b").shape
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    asks = dataclasses.replace(on("h200"), expandable_segments=setting)
    with pytest.raises(UserError, match=f"^PYTORCH_ALLOC_CONF: found '{setting}'.*Unset the variable"):
        check_target(spec, shape, asks)
    check_target(spec, shape, dataclasses.replace(asks, expandable_segments=None))
    check_target(spec, shape, dataclasses.replace(asks, gpus=False, capability=None))


def test_engines_need_the_compiler_of_torchs_cuda() -> None:
    spec, shape = experiment(), read_plan_subject("qwen3_8b").shape
    other = "/usr/local/cuda/bin/nvcc of CUDA 12.4"
    lacks = dataclasses.replace(on("h200"), other_compilers=other)
    with pytest.raises(UserError, match=f"^CUDA_HOME: found 'nvcc: {other}', expected one of CUDA .*Install that"):
        check_target(spec, shape, lacks)
    check_target(spec, shape, dataclasses.replace(lacks, other_compilers=None))


def test_ranks_that_the_model_does_not_divide_into_are_refused() -> None:
    shape = read_plan_subject("qwen3_8b").shape  # of 32 heads, 8 key heads
    for more, key in (({"trainer": {"tp": 3}}, "trainer.tp"), ({"rollout": {"tp": 3}}, "rollout.tp")):
        spec = experiment(**more, numerics={"mode": "native"})
        with pytest.raises(UserError, match=f"^{key}: found 3"):
            check_target(spec, shape, on("h200"))


def test_native_mode_on_a_cpu_has_heads_as_sglang_takes_them_there(tmp_path: Path) -> None:
    for heads, head_dim in ((9, 128), (5, 128)):  # of 640 channels
        path = tmp_path / str(heads)
        write_tiny_model(path, TinyModel(hidden=640, heads=heads, head_dim=head_dim, experts=0, family="qwen2"))
        shape, native = read_plan_subject(str(path)).shape, experiment(numerics=NATIVE)
        if heads * head_dim != 640:
            with pytest.raises(
                UserError, match="^numerics.mode: found 'native on CPUs, with heads of 128 .*SGLang's own"
            ):
                check_target(native, shape, on(None))
        else:
            check_target(native, shape, on(None))
        check_target(experiment(), shape, on(None))


@pytest.mark.parametrize("more", [{"trainer": {"dp": 2}}, {"rollout": {"engines": 2}}])
def test_a_shared_base_is_on_one_gpu(more: dict[str, Any]) -> None:
    adapted, shape = {"adapter": {"rank": 8}, "sync": {"shared_base": True}}, read_plan_subject("qwen3_8b").shape
    check_target(experiment(**adapted), shape, on("h200"))
    check_target(experiment(**adapted, **more), shape, on(None))
    with pytest.raises(UserError, match=r"^sync.shared_base: found 'true with . trainer rank\(s\) and . engine\(s\)"):
        check_target(experiment(**adapted, **more), shape, on("h200"))
