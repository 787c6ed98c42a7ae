"""Machines written by hand, judged; and this one, through the command."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fp8rl.diagnose.doctor.machine
from fp8rl.diagnose.doctor import judge
from fp8rl.diagnose.doctor.doctor_report import DataFound, Diagnosis, rendered
from fp8rl.diagnose.doctor.machine import InstalledGpu, Machine, parse_nvidia_smi
from fp8rl.diagnose.report import Remark
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from tests.support.commands import result_of
from tests.support.paths import EXAMPLES

CPU_LIBRARIES = {
    "torch": "2.13.0+cpu",
    "triton": "3.7.1",
    "transformer_engine": None,
    "transformer_engine_torch": None,
    "megatron-core": "0.16.1",
    "sglang": "0.5.19",
    "sglang-kernel": None,
    "sgl-deep-gemm": None,
    "flashinfer-python": None,
    "transformers": "5.12.1",
    "ray": "2.60.0",
    "wandb": "0.31.0",
    "fp8rl-cpu-stubs": "0.1.0",
}
GPU_LIBRARIES = CPU_LIBRARIES | {
    "torch": "2.13.0+cu130",
    "transformer_engine": "2.20.2",
    "transformer_engine_torch": "2.20.2",
    "sglang-kernel": "0.4.6.post1",
    "sgl-deep-gemm": "0.1.7",
    "flashinfer-python": "0.6.18",
    "fp8rl-cpu-stubs": None,
}
WANTED = {
    "torch": "<2.14,>=2.13",
    "transformer_engine": "==2.20.2",
    "megatron-core": "==0.16.1",
    "sglang": "==0.5.19",
    "sglang-kernel": "==0.4.6.post1",
}
CPU = Machine(
    python="3.11.7",
    system="Linux x86_64",
    libraries=CPU_LIBRARIES,
    wanted=WANTED,
    cc="/usr/bin/gcc",
    cxx="/usr/bin/g++",
    compiles=True,
)
H200 = dataclasses.replace(
    CPU,
    libraries=GPU_LIBRARIES,
    gpus=(InstalledGpu("NVIDIA H200", 141 << 30, (9, 0)),) * 8,
    torch_sees=True,
    torch_cuda="13.0",
    driver="580.95.05",
    driver_cuda="13.0",
    cublaslt="13.1.1",
    nvcc="/usr/local/cuda/bin/nvcc",
)


def without(machine: Machine, *names: str) -> Machine:
    return dataclasses.replace(machine, libraries={**machine.libraries, **dict.fromkeys(names)})


def with_gpu(name: str, capability: tuple[int, int], **changes: str) -> Machine:
    return dataclasses.replace(H200, gpus=(InstalledGpu(name, 80 << 30, capability),), **changes)


def numerics(mode: str = "exact", preset: str = "fp8_block_pow2", **precision: str) -> NumericsConfig:
    return NumericsConfig(mode=mode, spec=QuantSpec.preset(preset), **precision)  # type: ignore[arg-type]


NATIVE = numerics("native")


def ops(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    return [(side.name, side.device, side.ops) for side in diagnosis.sides]


def keys(diagnosis: Diagnosis) -> list[tuple[str, bool]]:
    return [(remark.key, remark.blocks) for remark in diagnosis.remarks]


def test_a_cpu_runs_both_modes_emulated() -> None:
    exact, native = judge(CPU, numerics()), judge(CPU, NATIVE)
    assert exact.ok and native.ok and exact.remarks == native.remarks == ()
    shared = "shared ops, torch, emulated FP8"
    assert ops(exact) == [("trainer", "cpu", shared), ("engine", "cpu", shared)]
    assert ops(native) == [("trainer", "cpu", "Megatron-core, emulated FP8"), ("engine", "cpu", "SGLang, emulated FP8")]
    assert exact.sides[1].attention == "torch_native"
    assert exact.features == ()


def test_each_side_runs_its_own_precision() -> None:
    found = judge(CPU, numerics("native", trainer="bf16"))
    assert [(side.precision, side.ops) for side in found.sides] == [
        ("bf16", "Megatron-core"),
        ("fp8", "SGLang, emulated FP8"),
    ]


def test_an_h200_runs_exact_mode_on_our_kernels() -> None:
    found = judge(H200, numerics())
    assert found.ok and found.remarks == ()
    shared = "shared ops, Triton kernels, FP8 products on DeepGEMM where its bits are theirs"
    assert ops(found) == [("trainer", "cuda", shared), ("engine", "cuda", shared)]
    without = judge(H200, dataclasses.replace(numerics(), deepgemm=False))
    assert ops(without) == [
        ("trainer", "cuda", "shared ops, Triton kernels"),
        ("engine", "cuda", "shared ops, Triton kernels"),
    ]
    bare = dataclasses.replace(H200, libraries={**H200.libraries, "sgl-deep-gemm": None})
    assert ops(judge(bare, numerics())) == ops(without)
    lacking = dataclasses.replace(H200, without_deepgemm="other bits, in experts")
    assert keys(judge(lacking, dataclasses.replace(numerics(), deepgemm=True))) == [("DeepGEMM", True)]
    assert found.sides[1].attention == "triton"
    can = found.features[0]
    assert len(found.features) == 8 and (can.fp8, can.blocks, can.mx) == (True, "native", False)


def test_an_h200_runs_native_mode_on_the_libraries() -> None:
    for preset in ("fp8_block_pow2", "fp8_block_fp32"):
        found = judge(H200, numerics("native", preset))
        assert found.ok and ops(found) == [("trainer", "cuda", "TransformerEngine"), ("engine", "cuda", "SGLang")]


def test_without_transformer_engine_an_h200_emulates_native_mode() -> None:
    machine = without(H200, "transformer_engine", "transformer_engine_torch")
    assert judge(machine, numerics()).remarks == ()
    found = judge(machine, NATIVE)
    assert found.ok and keys(found) == [("transformer_engine", False)]
    assert found.sides[0].ops == "Megatron-core, emulated FP8" and found.sides[1].ops == "SGLang"
    assert "==2.20.2" in found.remarks[0].expected and "install-gpu" in found.remarks[0].remedy


def test_another_transformer_engine_is_a_warning_and_one_without_its_torch_extension_in_the_way() -> None:
    assert keys(judge(without(H200, "transformer_engine_torch"), NATIVE)) == [("transformer_engine_torch", True)]
    machine = dataclasses.replace(H200, libraries=GPU_LIBRARIES | {"transformer_engine": "2.12.0"})
    assert keys(judge(machine, NATIVE)) == [("transformer_engine", False)]


def test_transformer_engine_refuses_what_it_does_not_offer() -> None:
    spec = QuantSpec.preset("fp8_block_pow2").override({"activation": {"group": 64}})
    found = judge(H200, NumericsConfig(mode="native", spec=spec))
    assert keys(found) == [("numerics.activation.group", True)]
    assert judge(CPU, NumericsConfig(mode="native", spec=spec)).ok


def test_cuda_12_8_has_no_128_blocks() -> None:
    machine = dataclasses.replace(H200, torch_cuda="12.8")
    assert judge(machine, numerics()).remarks == ()
    found = judge(machine, NATIVE)
    assert found.features[0].fp8 and found.features[0].blocks == "no"
    assert keys(found) == [("numerics.trainer", True)]
    assert "12.8" in found.remarks[0].found and "12.9" in found.remarks[0].expected
    bf16 = judge(machine, numerics("native", trainer="bf16"))
    assert bf16.remarks == () and bf16.sides[0].ops == "TransformerEngine"


def test_an_a100_has_no_fp8() -> None:
    machine = with_gpu("NVIDIA A100-SXM4-80GB", (8, 0))
    exact, native = judge(machine, numerics()), judge(machine, NATIVE)
    assert exact.ok and exact.sides[0].ops == "shared ops, torch, emulated FP8"
    can = exact.features[0]
    assert (can.fp8, can.blocks, can.mx) == (False, "no", False)
    assert keys(native) == [("numerics.rollout", True), ("numerics.trainer", True)]
    assert judge(machine, numerics("native", "bf16", trainer="bf16", rollout="bf16")).remarks == ()


def test_mxfp8_takes_a_b200() -> None:
    spec = QuantSpec.preset("mxfp8").override(
        {role: {"scale": "pow2"} for role in ("weight", "activation", "gradient")}
    )
    mx = NumericsConfig(mode="native", spec=spec, rollout="bf16")
    assert judge(with_gpu("NVIDIA B200", (10, 0)), mx).ok
    assert keys(judge(with_gpu("NVIDIA H100 80GB HBM3", (9, 0)), mx)) == [("numerics.trainer", True)]


def test_a_b200_multiplies_blocks_as_mx() -> None:
    machine = with_gpu("NVIDIA B200", (10, 0))
    found = judge(machine, NATIVE)
    assert found.ok and (found.features[0].blocks, found.features[0].mx) == ("by MX", True)
    assert keys(judge(machine, numerics("native", "fp8_block_fp32"))) == [("numerics.preset", True)]


def test_the_weakest_gpu_decides() -> None:
    gpus = (InstalledGpu("NVIDIA H200", 141 << 30, (9, 0)), InstalledGpu("NVIDIA A100", 80 << 30, (8, 0)))
    assert judge(dataclasses.replace(H200, gpus=gpus), numerics()).sides[0].ops == "shared ops, torch, emulated FP8"


@pytest.mark.parametrize(
    ("torch_cuda", "driver_cuda", "remedy"),
    [(None, "13.0", "make install-gpu"), ("13.0", "12.4", "driver"), ("13.0", "13.0", "CUDA_VISIBLE_DEVICES")],
)
def test_a_gpu_that_torch_does_not_see_is_named(torch_cuda: str | None, driver_cuda: str, remedy: str) -> None:
    machine = dataclasses.replace(
        CPU, gpus=H200.gpus[:1], torch_cuda=torch_cuda, driver="550.54", driver_cuda=driver_cuda
    )
    found = judge(machine, numerics())
    assert found.ok and keys(found) == [("gpu", False)] and remedy in found.remarks[0].remedy
    assert found.sides[0].device == "cpu"


@pytest.mark.parametrize(
    ("machine", "key", "blocks"),
    [
        (without(CPU, "ray"), "ray", True),
        (without(CPU, "fp8rl-cpu-stubs"), "fp8rl-cpu-stubs", True),
        (without(H200, "sglang-kernel"), "sglang-kernel", True),
        (dataclasses.replace(CPU, libraries=CPU_LIBRARIES | {"sglang": "0.5.20"}), "sglang", True),
        (dataclasses.replace(H200, libraries=GPU_LIBRARIES | {"sglang-kernel": "0.4.10"}), "sglang-kernel", False),
        (dataclasses.replace(H200, libraries=GPU_LIBRARIES | {"fp8rl-cpu-stubs": "0.1.0"}), "fp8rl-cpu-stubs", True),
        (dataclasses.replace(CPU, cxx=None, compiles=False), "C++ compiler", False),
        (dataclasses.replace(CPU, compiles=False), "C++ compiler", False),
        (dataclasses.replace(H200, cc=None), "C compiler", True),
        (dataclasses.replace(H200, nvcc=None), "nvcc", True),
        (
            dataclasses.replace(H200, expandable_segments="PYTORCH_ALLOC_CONF=expandable_segments:True"),
            "PYTORCH_ALLOC_CONF",
            True,
        ),
        (dataclasses.replace(CPU, row_variant=("bf16 product",)), "row invariance", True),
        (dataclasses.replace(CPU, row_variant=None, probe_error="Illegal instruction"), "row invariance", True),
    ],
)
def test_every_obstacle_is_named_with_a_remedy(machine: Machine, key: str, blocks: bool) -> None:
    found = judge(machine, numerics())
    assert keys(found) == [(key, blocks)] and found.ok is not blocks
    assert found.remarks[0].found and found.remarks[0].expected and found.remarks[0].remedy.endswith(".")


def test_a_toolkit_of_another_cuda_is_named() -> None:
    (remark,) = judge(dataclasses.replace(H200, nvcc=None, other_nvcc="/opt/bin/nvcc of CUDA 12.4"), numerics()).remarks
    assert "12.4" in remark.found and "CUDA 13.0" in remark.expected and "CUDA_HOME" in remark.remedy


def test_native_mode_asks_for_no_row_invariance() -> None:
    assert judge(dataclasses.replace(CPU, row_variant=("bf16 product",)), NATIVE).ok


def test_obstacles_stand_before_warnings() -> None:
    machine = dataclasses.replace(CPU, compiles=False, row_variant=("rope",))
    assert [remark.blocks for remark in judge(machine, numerics()).remarks] == [True, False]


def console_text(diagnosis: Diagnosis) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(rendered(diagnosis))
    return console.export_text()


def test_the_page_says_it_all() -> None:
    text = console_text(judge(dataclasses.replace(H200, torch_cuda="12.8"), NATIVE))
    for part in ("NVIDIA H200", "141 GiB", "9.0", "580.95.05", "CUDA up to 13.0", "TransformerEngine", "obstacle"):
        assert part in text
    assert "cannot run here yet" in text


def test_nvidia_smi_is_read() -> None:
    lines = ["580.95.05, NVIDIA H200, 143771, 9.0", "580.95.05, NVIDIA H200, 143771, 9.0", ""]
    driver, gpus = parse_nvidia_smi(lines)
    assert driver == "580.95.05" and gpus == (InstalledGpu("NVIDIA H200", 143771 * 2**20, (9, 0)),) * 2
    assert parse_nvidia_smi(["580, NVIDIA GB10, [N/A], 12.1"])[1] == (InstalledGpu("NVIDIA GB10", 0, (12, 1)),)
    assert parse_nvidia_smi(["580, NVIDIA A, 1024, [N/A]"]) == ("580", ())
    assert parse_nvidia_smi(["No devices were found"]) == (None, ())


def test_json_holds_the_diagnosis() -> None:
    values = json.loads(judge(H200, NATIVE).to_json())
    assert values["schema"] == 1 and values["ok"] and values["mode"] == "native"
    assert values["spec_digest"] == QuantSpec.preset("fp8_block_pow2").digest()
    assert values["machine"]["gpus"][0]["capability"] == [9, 0] and values["features"][0]["blocks"] == "native"


@pytest.mark.slow
def test_this_machine_through_the_command() -> None:
    command = [sys.executable, "-c", "from fp8rl.cli import app; app()", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1), done.stderr
    assert found["machine"]["libraries"]["torch"] == torch.__version__
    assert found["machine"]["wanted"]["sglang"] == "==0.5.19"
    if not torch.cuda.is_available():
        assert (
            found["ok"] and found["machine"]["row_variant"] == [] and found["sides"][1]["attention"] == "torch_native"
        )


def test_a_spec_that_is_not_there_is_wrong_input(tmp_path: Path) -> None:
    result = result_of("doctor", tmp_path / "none.yaml")
    assert result.exit_code == 2 and "error: spec: found " in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.pp=3", "trainer.pp: found 3"),
        ("model.path=/nowhere", "model.path: found '/nowhere'"),
        ("data.train=/nowhere", "data.train: found"),
        ("numerics.first_layers_bf16=5", "first_layers_bf16"),
        ("rollout.context_length=2000000", "rollout.context_length: found 2000000"),
    ],
)
def test_what_a_run_would_refuse_is_in_the_way(monkeypatch: pytest.MonkeyPatch, override: str, said: str) -> None:
    monkeypatch.setattr(fp8rl.diagnose.doctor.machine, "gather", lambda numerics, say, quick: CPU)
    result = result_of("doctor", EXAMPLES / "arithmetic.yaml", override)
    assert result.exit_code == 1 and said in result.output


def test_a_message_that_was_given_whole_is_shown_as_it_stands() -> None:
    whole = Remark.refusal(UserError("spec.yaml: two names for one thing. Leave one out."))
    assert whole.shown("obstacle", "warning").plain == "obstacle  spec.yaml: two names for one thing. Leave one out."


def test_what_is_in_the_way_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8rl.diagnose.doctor.machine, "gather", lambda numerics, say, quick: without(CPU, "ray"))
    result = result_of("doctor")
    assert result.exit_code == 1 and "obstacle  ray: found not installed" in result.output


REWARDS = """
def ends(answer: str, reference: str) -> float:
    return float(answer.endswith(reference))

def parts(answers: list[str], tokens: list[int]) -> list[dict[str, float]]:
    return [{"length": float(len(answer)), "many": float(count > 1)} for answer, count in zip(answers, tokens)]

def broken(answer: str) -> float:
    raise ValueError("no [/b] such thing")

async def asks(answer: str) -> float:
    return 1.0
"""


@pytest.mark.slow
def test_the_doctor_shows_the_data_and_what_rewards_give_to_the_reference(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    lines = [{"question": f"[b]{n}+1=?", "answer": f"#### {n + 1}"} for n in range(3)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = ["ends", "parts", "broken", "asks"]
    overrides = [
        f"data={{train: {tmp_path}/data.jsonl, eval: {tmp_path}/data.jsonl}}",
        "eval.problems=2",
        f"rewards=[{', '.join(f'{{function: {tmp_path}/rewards.py:{name}}}' for name in names)}]",
    ]
    example = str(EXAMPLES / "arithmetic.yaml")
    result = result_of("doctor", example, "--quick", "--json", *overrides)
    assert result.exit_code == 0, result.output
    diagnosis = Diagnosis.from_json(result.stdout[result.stdout.index("{") :])
    assert not diagnosis.machine.probed
    train, held_out = diagnosis.data
    assert (train.key, train.problems, held_out.key) == ("data.train", 3, "data.eval")
    assert (train.prompt, train.prompt_tokens) == ("<|user|>[b]0+1=?<|assistant|>", 10)
    assert train.reference == "#### 1"
    assert train.rewards == {
        "ends": "1",
        "parts": "length 6, many 1",
        "broken": "nothing: ValueError: no [/b] such thing",
        "asks": "not asked here, as it may ask a service",
    }
    (note,) = diagnosis.notes
    assert note.startswith("All 2 evaluated problems of data.eval are also trained on")
    page = console_text(diagnosis)
    for said in ("3 problems in ", "the first prompt, 10 tokens:", "| <|user|>[b]0+1=?<|assistant|>", "no [/b] such"):
        assert said in page
    assert "can run here, as far as checked; the ops were not tested (--quick)" in " ".join(page.split())


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|Assistant|><think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "</think>\n\n"),
        ("<|START_THINKING|>", "<|START_THINKING|>"),
        ("[THINK]", "[THINK]"),
        ("<think> is a tag<|assistant|>", None),
    ],
)
def test_an_opening_that_stands_in_the_prompt_is_said(prompt: str, opening: str | None) -> None:
    found = DataFound("data.train", "x", 1, prompt, 9, "b", {"format": "0"})
    page = " ".join(console_text(dataclasses.replace(judge(CPU, numerics()), data=(found,))).split())
    assert (f"it ends in {opening!r}: an answer, and so what the reward `format` reads, begins behind it" in page) == (
        opening is not None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "overrides", "found"),
    [
        (["config.json", "tokenizer*", "*.jinja"], [], ["model.path"]),
        (["tokenizer*", "*.jinja"], [], ["model.path"]),
        (["tokenizer*", "*.jinja"], ["rewards=[{function: integer, kwargs: {a: 1}}]"], ["model.path", "rewards"]),
        (["*"], ["trainer.pp=3", "eval.problems=100000"], ["trainer.pp", "eval.problems"]),
        (["config.json"], [], ["model.path"]),
    ],
)  # fmt: skip
def test_data_rewards_and_prompt_are_shown_by_the_tokenizer_alone_whatever_else_is_refused(
    kept: list[str], overrides: list[str], found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = dataclasses.replace(CPU, row_variant=("x",))
    monkeypatch.setattr(fp8rl.diagnose.doctor.machine, "gather", lambda numerics, say, quick: broken)
    for file in {file for pattern in kept for file in (EXAMPLES / "models/tiny_qwen3_moe").glob(pattern)}:
        shutil.copy(file, tmp_path)
    example = str(EXAMPLES / "arithmetic.yaml")
    result = result_of("doctor", example, "--json", f"model.path={tmp_path}", *overrides)
    diagnosis = Diagnosis.from_json(result.stdout[result.stdout.index("{") :])
    *refused, machine = [key for key, blocks in keys(diagnosis) if blocks]
    assert result.exit_code == 1 and machine == "row invariance"
    assert [each.partition(".")[0] for each in refused] == [each.partition(".")[0] for each in found]
    shown = [(each.key, each.prompt, [*each.rewards]) for each in diagnosis.data]
    assert [key for key, _, _ in shown] == (["data.train", "data.eval"] if kept != ["config.json"] else [])
    assert all(prompt.startswith("<|user|>") and rewards == ["integer"] for _, prompt, rewards in shown)


def test_supervised_data_have_no_reward_and_a_long_prompt_is_shown_at_its_ends() -> None:
    found = DataFound("data.train", "x", 1, "a" * 5000, 900, "b", {})
    page = console_text(dataclasses.replace(judge(CPU, numerics()), data=(found,)))
    assert "[... 3,000 characters ...]" in page and "1 problem in x" in page and "gives to" not in page
