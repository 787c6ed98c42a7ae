"""Wrong input to `fp8rl train`: one message, exit code 2, nothing started, nothing written."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.support.cli_runs import FP8RL, ROOT
from tests.support.commands import result_of
from tests.support.tiny_model import TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe"
    write_tiny_model(path, TinyModel(heads=4, kv_heads=2))
    return path


@pytest.fixture
def spec(tmp_path: Path, model: Path) -> Path:
    """A spec file that would run."""
    for name in ("train", "eval"):
        lines = [f'{{"question": "{n}+4=?", "answer": "#### {n + 4}"}}\n' for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    path, run = tmp_path / "spec.yaml", {"name": "it", "dir": str(tmp_path / "runs"), "steps": 1}
    sections = {"run": run, "model": {"path": str(model)}, "data": {"train": "train.jsonl", "eval": "eval.jsonl"}}
    path.write_text(yaml.safe_dump({**sections, "eval": {"problems": 4}}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.lr=-1", ["trainer.lr: found -1", "greater than", "trainer.lr=VALUE"]),
        ("trainer.dp=1000", ["trainer.dp: found 1000", "GiB", "Lower"]),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected_and_nothing_is_started(
    spec: Path, monkeypatch: pytest.MonkeyPatch, override: str, parts: list[str]
) -> None:
    """Whatever else is refused is shown where it is read: tests/rl/experiment, tests/fp8rl/test_bad_input.py."""
    monkeypatch.setattr("fp8rl.rl.run.run.Run.__init__", None)
    before = psutil.Process().children(recursive=True)
    result = result_of("train", spec, override)
    assert result.exit_code == 2 and "Traceback" not in result.stderr, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("error: ") == 1
    assert all(part in result.stderr for part in parts), result.stderr
    assert not (spec.parent / "runs").exists()
    assert psutil.Process().children(recursive=True) == before


def test_other_floats_are_rounded_to_bf16_before_they_are_quantized(model: Path, tmp_path: Path) -> None:
    stored = {name: torch.randn(tensor.shape) for name, tensor in load_file(model / "model.safetensors").items()}
    variants = {"wide": stored, "rounded": {name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}}
    for name, tensors in variants.items():
        source = Path(shutil.copytree(model, tmp_path / name))
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        assert result_of("convert", source, tmp_path / f"{name}_out").exit_code == 0
    wide, rounded = (load_file(tmp_path / f"{name}_out" / "model.safetensors") for name in variants)
    assert wide.keys() == rounded.keys()
    for name, tensor in wide.items():
        assert tensor.dtype == rounded[name].dtype and tensor.view(torch.uint8).equal(rounded[name].view(torch.uint8))


@pytest.mark.slow
def test_the_process_itself_ends_with_code_2(spec: Path) -> None:
    done = subprocess.run(
        [FP8RL, "train", spec, "trainer.lrr=1"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stdout == f"fp8rl: checking {spec}\n"
    assert done.stderr.count("\n") == 1 and "Did you mean trainer.lr?" in done.stderr
    assert not (spec.parent / "runs").exists()
