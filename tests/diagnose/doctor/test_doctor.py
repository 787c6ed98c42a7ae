"""Machines written by hand, judged; and this one, through the command."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import yaml

import fp8rl.diagnose.doctor
from fp8rl.diagnose.doctor.doctor_report import DataFound, reported
from fp8rl.diagnose.doctor.judge import judge
from fp8rl.diagnose.doctor.machine import Machine, parse_nvidia_smi
from fp8rl.diagnose.report import Finding
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment.budget.job import Gpu
from tests.support.commands import report_of, result_of, shown
from tests.support.paths import EXAMPLES
from tests.support.preconditions import edit_config, write_lines
from tests.support.tiny_model import TinyModel, write_tiny_model

CPU_LIBRARIES: dict[str, str | None] = {
    "torch": "2.13.0+cpu", "triton": "3.7.1", "megatron-core": "0.16.1", "sglang": "0.5.19",
    "transformers": "5.12.1", "ray": "2.60.0", "wandb": "0.31.0", "fp8rl-cpu-stubs": "0.1.0",
    **dict.fromkeys(("transformer_engine", "transformer_engine_torch", "sglang-kernel", "sgl-deep-gemm")),
    "flashinfer-python": None,
}  # fmt: skip
GPU_LIBRARIES = CPU_LIBRARIES | {
    "torch": "2.13.0+cu130", "transformer_engine": "2.20.2", "transformer_engine_torch": "2.20.2",
    "sglang-kernel": "0.4.6.post1", "sgl-deep-gemm": "0.1.7", "flashinfer-python": "0.6.18", "fp8rl-cpu-stubs": None,
}  # fmt: skip
WANTED = {
    "torch": "<2.14,>=2.13", "transformer_engine": "==2.20.2", "megatron-core": "==0.16.1", "sglang": "==0.5.19",
    "sglang-kernel": "==0.4.6.post1",
}  # fmt: skip
CPU = Machine(
    python="3.11.7", system="Linux x86_64", libraries=CPU_LIBRARIES, wanted=WANTED, cc="/usr/bin/gcc",
    cxx="/usr/bin/g++", compiles=True,
)  # fmt: skip
H200 = replace(
    CPU, libraries=GPU_LIBRARIES, gpus=(Gpu("NVIDIA H200", (9, 0), 141 << 30),) * 8, torch_sees=True,
    torch_cuda="13.0", driver="580.95.05", driver_cuda="13.0", nvcc="/usr/local/cuda/bin/nvcc",
)  # fmt: skip


def with_libraries(machine: Machine, **versions: str | None) -> Machine:
    named = {name.replace("__", "-"): version for name, version in versions.items()}
    return replace(machine, libraries={**machine.libraries, **named})


def with_gpu(name: str, capability: tuple[int, int]) -> Machine:
    return replace(H200, gpus=(Gpu(name, capability, 80 << 30),))


def numerics(mode: str = "exact", preset: str = "fp8_block_pow2", **precision) -> NumericsConfig:
    return NumericsConfig(mode=mode, spec=QuantSpec.preset(preset), **precision)  # type: ignore[arg-type]


def keys(findings: Iterable[Finding]) -> list[tuple[str, bool]]:
    """Each finding's key, and whether it is in the way."""
    return [(each.key, each.grade == "error") for each in findings if each.grade != "note"]


EXACT, NATIVE, NATIVE_FP32 = numerics(), numerics("native"), numerics("native", "fp8_block_fp32")
EMULATED, KERNELS = "shared ops, torch, emulated FP8", "shared ops, Triton kernels"
DEEPGEMM = KERNELS + ", FP8 products on DeepGEMM if it gives the kernels' bits"
A100, H100 = with_gpu("NVIDIA A100-SXM4-80GB", (8, 0)), with_gpu("NVIDIA H100 80GB HBM3", (9, 0))
B200 = with_gpu("NVIDIA B200", (10, 0))
CUDA_12_8 = replace(H200, torch_cuda="12.8")
GROUPS_OF_64 = replace(NATIVE, spec=NATIVE.spec.override({"activation": {"group": 64}}))
MX = QuantSpec.preset("mxfp8").override({role: {"scale": "pow2"} for role in ("weight", "activation", "gradient")})
ALLOCATOR = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@pytest.mark.parametrize(
    ("machine", "config", "trainer", "engine", "findings"),
    [
        (CPU, EXACT, EMULATED, EMULATED, []),
        (CPU, NATIVE, "Megatron-core, emulated FP8", "SGLang, emulated FP8", []),
        (CPU, numerics("native", trainer="bf16"), "Megatron-core", "SGLang, emulated FP8", []),
        (CPU, GROUPS_OF_64, "Megatron-core, emulated FP8", "SGLang, emulated FP8", []),
        (H200, EXACT, DEEPGEMM, DEEPGEMM, []),
        (H200, numerics(deepgemm=False), KERNELS, KERNELS, []),
        (with_libraries(H200, sgl__deep__gemm=None), EXACT, KERNELS, KERNELS, [("sgl-deep-gemm", True)]),
        (replace(H200, without_deepgemm="other bits"), numerics(deepgemm=True), None, None, [("DeepGEMM", True)]),
        (H200, NATIVE, "TransformerEngine", "SGLang", []),
        (H200, NATIVE_FP32, "TransformerEngine", "SGLang", []),
        (H200, GROUPS_OF_64, None, None, [("numerics.activation.group", True)]),
        (with_libraries(H200, transformer_engine=None, transformer_engine_torch=None), NATIVE,
         "Megatron-core, emulated FP8", "SGLang", [("transformer_engine", False)]),
        (with_libraries(H200, transformer_engine_torch=None), NATIVE, None, None, [("transformer_engine_torch", True)]),
        (with_libraries(H200, transformer_engine="2.12.0"), NATIVE, None, None, [("transformer_engine", False)]),
        (CUDA_12_8, EXACT, DEEPGEMM, DEEPGEMM, []),
        (CUDA_12_8, NATIVE, None, None, [("numerics.trainer", True)]),
        (CUDA_12_8, numerics("native", trainer="bf16"), "TransformerEngine", "SGLang", []),
        (A100, EXACT, EMULATED, EMULATED, []),
        (A100, NATIVE, None, None, [("numerics.rollout", True), ("numerics.trainer", True)]),
        (A100, numerics("native", "bf16", trainer="bf16", rollout="bf16"), "TransformerEngine", "SGLang", []),
        (B200, NATIVE, "TransformerEngine", "SGLang", []),
        (B200, NATIVE_FP32, None, None, [("numerics.preset", True)]),
        (B200, replace(NATIVE, spec=MX, rollout="bf16"), "TransformerEngine", "SGLang", []),
        (H100, replace(NATIVE, spec=MX, rollout="bf16"), None, None, [("numerics.trainer", True)]),
        (replace(H200, gpus=(*H200.gpus, *A100.gpus)), EXACT, EMULATED, EMULATED, []),  # the weakest decides
        (replace(CPU, row_variant=("bf16 product",)), NATIVE, None, None, []),
        (replace(CPU, row_variant=("x",), compiles=False), EXACT, None, None,
         [("row invariance", True), ("C++ compiler", False)]),
        (replace(CPU, row_variant=None, probe_error="Illegal"), EXACT, None, None, [("row invariance", True)]),
        (with_libraries(CPU, ray=None), EXACT, None, None, [("ray", True)]),
        (with_libraries(H200, fp8rl__cpu__stubs="0.1.0"), EXACT, None, None, [("fp8rl-cpu-stubs", True)]),
        (with_libraries(H200, sglang__kernel="0.4.10"), EXACT, None, None, [("sglang-kernel", False)]),
        (with_libraries(CPU, sglang="0.5.20"), EXACT, None, None, [("sglang", True)]),
        (replace(CPU, cxx=None, compiles=False), EXACT, None, None, [("C++ compiler", False)]),
        (replace(H200, cc=None), EXACT, None, None, [("C compiler", True)]),
        (replace(H200, nvcc=None), EXACT, None, None, [("nvcc", True)]),
        (replace(H200, expandable_segments=ALLOCATOR), EXACT, None, None, [("PYTORCH_ALLOC_CONF", True)]),
    ],
)  # fmt: skip
def test_a_machine_is_judged(machine, config, trainer, engine, findings) -> None:
    found = judge(machine, config)
    assert keys(found.findings) == findings and reported(found).ok is not any(blocks for _, blocks in findings)
    assert all(each.found and each.expected and each.remedy.endswith(".") for each in found.findings)
    device = "cuda" if machine.gpus else "cpu"
    assert trainer is None or [(s.device, s.ops) for s in found.sides] == [(device, trainer), (device, engine)]


def test_what_gpus_can_do() -> None:
    can = [judge(machine, EXACT).features[0] for machine in (A100, CUDA_12_8, H200, B200)]
    assert [(each.fp8, each.blocks) for each in can] == [(False, "no"), (True, "no"), (True, "native"), (True, "by MX")]
    assert [each.mx for each in can] == [False, False, False, True]
    assert judge(CPU, EXACT).features == () and len(judge(H200, EXACT).features) == 8
    assert [judge(machine, EXACT).sides[1].attention for machine in (CPU, H200)] == ["torch_native", "triton"]


@pytest.mark.parametrize(
    ("torch_cuda", "driver_cuda", "remedy"),
    [(None, "13.0", "make install-gpu"), ("13.0", "12.4", "driver"), ("13.0", "13.0", "CUDA_VISIBLE_DEVICES")],
)
def test_a_gpu_that_torch_does_not_see_is_named(torch_cuda: str | None, driver_cuda: str, remedy: str) -> None:
    found = judge(replace(CPU, gpus=H200.gpus[:1], torch_cuda=torch_cuda, driver_cuda=driver_cuda), EXACT)
    assert keys(found.findings) == [("gpu", False)] and remedy in found.findings[0].remedy
    assert found.sides[0].device == "cpu"


def test_a_toolkit_of_another_cuda_is_named() -> None:
    (found,) = judge(replace(H200, nvcc=None, other_nvcc="/opt/bin/nvcc of CUDA 12.4"), EXACT).findings
    assert "12.4" in found.found and "CUDA 13.0" in found.expected and "CUDA_HOME" in found.remedy


def test_the_page_says_it_all_and_so_does_the_json() -> None:
    found = judge(CUDA_12_8, NATIVE)
    parts = ("NVIDIA H200", "141 GiB", "9.0", "580.95.05", "CUDA up to 13.0", "TransformerEngine", "error")
    assert all(part in shown(reported(found)) for part in (*parts, "cannot run here yet"))
    report = reported(found, "spec.yaml")
    assert report_of(report.to_json()).to_json() == report.to_json()
    assert [*json.loads(report.to_json())] == ["schema", "command", "subject", "versions", "findings", "facts"]


def test_nvidia_smi_is_read() -> None:
    lines = ["580.95.05, NVIDIA H200, 143771, 9.0", "580.95.05, NVIDIA H200, 143771, 9.0", ""]
    driver, gpus = parse_nvidia_smi(lines)
    assert driver == "580.95.05" and gpus == (Gpu("NVIDIA H200", (9, 0), 143771 * 2**20),) * 2
    assert parse_nvidia_smi(["580, NVIDIA GB10, [N/A], 12.1"])[1] == (Gpu("NVIDIA GB10", (12, 1), 0),)
    assert parse_nvidia_smi(["580, NVIDIA A, 1024, [N/A]"]) == ("580", ())
    assert parse_nvidia_smi(["No devices were found"]) == (None, ())


@pytest.mark.slow
def test_this_machine_through_the_command() -> None:
    command = [sys.executable, "-c", "from fp8rl.cli import app; app()", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)
    machine = found["facts"]["machine"]
    assert machine["libraries"]["torch"] == found["versions"]["torch"] == torch.__version__
    assert machine["wanted"]["sglang"] == "==0.5.19"
    assert done.returncode in (0, 1), done.stderr
    if not torch.cuda.is_available():
        assert done.returncode == 0 and machine["row_variant"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "said"),
    [("trainer.pp=3", "trainer.pp: found 3"), ("data.train=/nowhere", "data.train: found"),
     ("numerics.first_layers_bf16=5", "first_layers_bf16"), ("", "error  ray: found not installed")],
)  # fmt: skip
def test_what_is_in_the_way_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch, override: str, said: str) -> None:
    lacking = CPU if override else with_libraries(CPU, ray=None)
    monkeypatch.setattr(fp8rl.diagnose.doctor, "gather", lambda numerics, say, quick: lacking)
    result = result_of("doctor", *([EXAMPLES / "arithmetic.yaml", override] if override else []))
    assert result.exit_code == 1 and said in result.output


def test_a_message_that_was_given_whole_is_shown_as_it_stands() -> None:
    whole = Finding.of_error(UserError("spec.yaml: two names for one thing. Leave one out."))
    assert str(whole) == "spec.yaml: two names for one thing. Leave one out." and whole.grade == "error"


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
def test_the_doctor_shows_the_data_and_what_rewards_give_to_the_reference(tmp_path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    lines = [{"question": f"[b]{n}+1=?", "answer": f"#### {n + 1}"} for n in range(3)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = ["ends", "parts", "broken", "asks"]
    overrides = [
        f"data={{train: {tmp_path}/data.jsonl, eval: {tmp_path}/data.jsonl}}", "eval.problems=2",
        f"rewards=[{', '.join(f'{{function: {tmp_path}/rewards.py:{name}}}' for name in names)}]",
    ]  # fmt: skip
    example = str(EXAMPLES / "arithmetic.yaml")
    result = result_of("doctor", example, "--quick", "--json", *overrides)
    assert result.exit_code == 0, result.output
    report = report_of(result.stdout[result.stdout.index("{") :])
    assert not report.facts["machine"]["probed"]
    train, held_out = report.facts["data"]
    assert (train["key"], train["problems"], held_out["key"]) == ("data.train", 3, "data.eval")
    assert (train["prompt"], train["prompt_tokens"]) == ("<|user|>[b]0+1=?<|assistant|>", 10)
    assert train["reference"] == "#### 1"
    assert train["rewards"] == {
        "ends": "1",
        "parts": "length 6, many 1",
        "broken": "nothing: ValueError: no [/b] such thing",
        "asks": "not known: the function may call a service, so it was not called",
    }
    note, memory = [finding for finding in report.findings if finding.grade == "note"]
    assert memory.key == "memory" and note.found.startswith("All 2 evaluated problems of data.eval are also trained on")
    page = " ".join(result_of("doctor", example, "--quick", *overrides).stdout.split())
    for said in ("3 problems in", "the first prompt, 10 tokens:", "| <|user|>[b]0+1=?<|assistant|>", "no [/b] such"):
        assert said in page
    assert "can run here, as far as checked; the ops were not tested, and the sides not started (--quick)" in page


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [("<|Assistant|><think>\n", "<think>\n"), ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "</think>\n\n"),
     ("<|START_THINKING|>", "<|START_THINKING|>"), ("<think> is a tag<|assistant|>", None)],
)  # fmt: skip
def test_an_opening_that_stands_in_the_prompt_is_said(prompt: str, opening: str | None) -> None:
    found = DataFound("data.train", "x", 1, prompt, 9, "b", {"format": "0"})
    page = " ".join(shown(reported(replace(judge(CPU, EXACT), data=(found,)))).split())
    assert (f"it ends in {opening!r}: the answer, which the reward `format` reads, begins after that" in page) == (
        opening is not None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "overrides", "found"),
    [
        (["config.json", "tokenizer*", "*.jinja"], [], ["model.path"]),
        (["tokenizer*", "*.jinja"], ["rewards=[{function: integer, kwargs: {a: 1}}]"], ["model.path", "rewards"]),
        (["*"], ["trainer.pp=3", "eval.problems=100000"], ["trainer.pp", "eval.problems"]),
        (["config.json"], [], ["model.path"]),
    ],
)  # fmt: skip
def test_data_rewards_and_prompt_are_shown_by_the_tokenizer_alone_whatever_else_is_refused(
    kept: list[str], overrides: list[str], found: list[str], tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(CPU, row_variant=("x",))
    monkeypatch.setattr(fp8rl.diagnose.doctor, "gather", lambda numerics, say, quick: broken)
    for file in {file for pattern in kept for file in (EXAMPLES / "models/tiny_qwen3_moe").glob(pattern)}:
        shutil.copy(file, tmp_path)
    example = str(EXAMPLES / "arithmetic.yaml")
    result = result_of("doctor", example, "--json", f"model.path={tmp_path}", *overrides)
    report = report_of(result.stdout[result.stdout.index("{") :])
    *refused, machine = [key for key, blocks in keys(report.findings) if blocks]
    assert result.exit_code == 1 and machine == "row invariance"
    assert [each.partition(".")[0] for each in refused] == [each.partition(".")[0] for each in found]
    shown = [(each["key"], each["prompt"], [*each["rewards"]]) for each in report.facts["data"]]
    assert [key for key, _, _ in shown] == (["data.train", "data.eval"] if kept != ["config.json"] else [])
    assert all(prompt.startswith("<|user|>") and rewards == ["integer"] for _, prompt, rewards in shown)


def test_supervised_data_have_no_reward_and_a_long_prompt_is_shown_at_its_ends() -> None:
    found = DataFound("data.train", "x", 1, "a" * 5000, 900, "b", {})
    page = shown(reported(replace(judge(CPU, EXACT), data=(found,))))
    assert "[... 3,000 characters ...]" in page and "1 problem in x" in page and "gives to" not in page


@pytest.mark.parametrize(
    ("shape", "config", "arguments", "said"),
    [(TinyModel(hidden=192, heads=4, kv_heads=2), {}, [], "multiple of 128"),
     (TinyModel(heads=4, kv_heads=2), {"num_hidden_layers": 3}, [], "model.layers.2.input_layernorm.weight: found"),
     (TinyModel(heads=4, kv_heads=2), {}, ["algorithm.name=sft"], "can run here")],
    ids=["misaligned", "of another architecture", "without an engine"],
)  # fmt: skip
def test_nothing_is_started_for_what_cannot_agree(shape, config, arguments, said, tmp_path, monkeypatch) -> None:
    monkeypatch.delattr("fp8rl.diagnose.doctor.pair.open_pair")
    machine = replace(CPU, row_variant=())
    monkeypatch.setattr(fp8rl.diagnose.doctor, "gather", lambda numerics, say, quick: machine)
    write_tiny_model(tmp_path / "model", shape)
    edit_config(tmp_path / "model", **config)
    write_lines(tmp_path / "train.jsonl", [("1+4=?", "#### 5")])
    sections = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}, "eval": {"problems": 0}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(sections))
    result = result_of("doctor", tmp_path / "spec.yaml", *arguments)
    assert result.exit_code == (0 if arguments else 1) and said in " ".join(result.output.split())


@pytest.mark.parametrize("former", ["preflight", "audit"])
def test_a_former_command_names_the_doctor_and_asks_it(former: str) -> None:
    result = result_of(former, "examples/arithmetic.yaml", "numerics.modes=exact")
    assert result.exit_code == 2 and result.stdout == ""
    assert f"`fp8rl {former}` is now `fp8rl doctor`" in result.stderr and "numerics.mode" in result.stderr
