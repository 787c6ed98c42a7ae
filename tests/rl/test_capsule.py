"""What a capsule keeps, and how a damaged one is refused. Real replays are in tests/e2e/test_gates.py."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from numerics.config import NumericsConfig
from numerics.errors import UserError
from rl.guard.capsule import cut_capsules, read_capsule, write_capsule
from rl.guard.evidence import Evidence
from rl.run_dir import RunDir, create_run_dir, write_spec
from rl.spec import parse_spec
from trainer.batch import TokenBatch
from weight_sync.manifest import Manifest

VALUES = {"model": {"path": "/m"}, "data": {"train": "/t"}}
WIDTH, LAYERS, TOP_K = 6, 2, 3


def evidence(*differences: list[float]) -> Evidence:
    """One row for each list of d: two tokens of prompt, then the sampled ones."""
    rows = len(differences)
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2 + len(d) for d in differences])
    position = torch.arange(WIDTH)
    mask = (position >= 2) & (position < lengths[:, None])
    rollout = torch.where(mask, -torch.rand(rows, WIDTH, generator=draw), 0.0)
    d = torch.zeros(rows, WIDTH)
    d[mask] = torch.tensor([value for row in differences for value in row])
    routes = torch.randint(0, 8, (rows, WIDTH, LAYERS, TOP_K), generator=draw).short()
    batch = TokenBatch(
        tokens=torch.randint(0, 100, (rows, WIDTH), generator=draw),
        lengths=lengths,
        loss_mask=mask,
        temperature=0.7,
        fields={"rollout_logprobs": rollout, "advantages": mask.float()},
        routes=routes,
        replay=True,
    )
    return Evidence(batch, torch.where(mask, 3, 0), 3, rollout + d, routes.flip(0))


def a_stack(folder: Path, **guard: Any) -> Any:
    """The parts of a stack that a capsule is written from."""
    spec = parse_spec({**VALUES, "guard": guard})
    run = create_run_dir(folder, "run")
    write_spec(run, spec.to_dict())
    numerics = spec.numerics_config()
    run.manifest(3).parent.mkdir()
    Manifest("3", numerics.rollout_spec.digest(), {"a.weight": "1234@3"}).save(run.manifest(3))

    def export_hf(path: Path) -> None:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"weights")

    trainer = SimpleNamespace(export_hf=export_hf)
    return SimpleNamespace(spec=spec, run=run, numerics=numerics, manifest=run.manifest(3), trainer=trainer)


@pytest.fixture
def capsule(tmp_path: Path) -> Path:
    return write_capsule(a_stack(tmp_path), 4, ["resync: because"], evidence([0.0], [0.5, -1.0]), [1, 0], 2.0)


def test_the_worst_rows_come_first_and_non_finite_ones_before_all() -> None:
    seen = evidence([0.1, 0.0], [0.0, -0.4, 0.0], [0.0], [math.nan, 0.0], [0.2, 0.2], [-math.inf])
    assert seen.worst_rows(4) == [3, 5, 1, 4]
    assert seen.worst_rows(99) == [3, 5, 1, 4, 0, 2]
    assert seen.abs_differences()[0, 2].item() == pytest.approx(0.1) and seen.abs_differences()[0, 0] == 0


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    stack = a_stack(tmp_path)
    stack.numerics = dataclasses.replace(stack.numerics, trainer="bf16")
    seen = evidence([0.0], [0.5, math.nan, 0.25], [1.0, 0.0])
    path = write_capsule(stack, 4, ["one", "two"], seen, [1, 2], 1.5)
    assert path == stack.run.capsule(4) and stack.run.capsule_steps() == [4]
    read = read_capsule(path)
    assert (read.step, read.why, read.rows, read.tis_cap) == (4, ["one", "two"], [1, 2], 1.5)
    assert (
        read.numerics == stack.numerics and read.spec == stack.spec and read.manifest.entries == {"a.weight": "1234@3"}
    )
    assert read.weights is not None and (read.weights / "model.safetensors").read_bytes() == b"weights"

    chosen, back = seen.select([1, 2]), read.evidence
    assert chosen.batch.width == 5 and back.version == 3 and back.batch.replay and back.batch.temperature == 0.7
    for name in ("tokens", "lengths", "loss_mask", "routes"):
        assert torch.equal(getattr(back.batch, name), getattr(chosen.batch, name))
    for name in ("rollout_logprobs", "advantages"):
        assert torch.equal(back.batch.fields[name], chosen.batch.fields[name])
    assert torch.equal(back.versions, chosen.versions) and torch.equal(back.routes, chosen.routes)
    assert torch.equal(back.logprobs.view(torch.int32), chosen.logprobs.view(torch.int32)), "NaN included"
    assert read.metrics == back.metrics(1.5) == chosen.metrics(1.5)
    assert read.metrics["mismatch/nonfinite_count"] == 1 and read.metrics["mismatch/tokens"] == 4


def test_weights_are_left_out_on_demand(tmp_path: Path) -> None:
    stack = a_stack(tmp_path, capsule_weights=False)
    assert read_capsule(write_capsule(stack, 1, [], evidence([0.0]), [0], 2.0)).weights is None


def test_the_first_capsule_and_the_newest_stay(tmp_path: Path) -> None:
    stack = a_stack(tmp_path, capsules=3)
    kept = []
    for step in (2, 4, 5, 7):
        write_capsule(stack, step, [], evidence([0.0]), [0], 2.0)
        kept.append(stack.run.capsule_steps())
    assert kept == [[2], [2, 4], [2, 4, 5], [2, 5, 7]]


def test_a_resumed_run_forgets_capsules_of_steps_that_it_repeats(tmp_path: Path) -> None:
    stack = a_stack(tmp_path, capsules=3)
    for step in (10, 20, 31):
        write_capsule(stack, step, [], evidence([0.0]), [0], 2.0)
    cut_capsules(stack.run, 20)
    assert stack.run.capsule_steps() == [10, 20]
    write_capsule(stack, 22, [], evidence([0.0]), [0], 2.0)
    assert stack.run.capsule_steps() == [10, 20, 22], "the newest is not the one to go"


def test_a_second_capsule_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    stack = a_stack(tmp_path)
    for why in ("first", "again"):
        path = write_capsule(stack, 2, [why], evidence([0.0]), [0], 2.0)
    assert read_capsule(path).why == ["again"]
    assert [entry.name for entry in stack.run.capsules.iterdir()] == ["step_2"]


def test_a_failure_leaves_no_capsule(tmp_path: Path) -> None:
    stack = a_stack(tmp_path)
    stack.manifest = tmp_path / "absent"
    with pytest.raises(FileNotFoundError):
        write_capsule(stack, 2, [], evidence([0.0]), [0], 2.0)
    assert list(stack.run.capsules.iterdir()) == []


FILES = ["capsule.json", "manifest.json", "spec.yaml", "tensors.safetensors", "weights/model.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_or_missing_file_is_named(capsule: Path, name: str) -> None:
    data = bytearray((capsule / name).read_bytes())
    data[len(data) // 2] ^= 1
    (capsule / name).write_bytes(data)
    with pytest.raises(UserError, match=f"capsule file .*{name}: found .*expected SHA-256 .*copy it again"):
        read_capsule(capsule)
    (capsule / name).unlink()
    with pytest.raises(UserError, match=f"{name}: found 'no such file'"):
        read_capsule(capsule)


def test_a_file_without_a_checksum_is_refused(capsule: Path) -> None:
    sums = capsule / "SHA256SUMS"
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if "tensors" not in line))
    with pytest.raises(UserError, match="capsule file .*tensors.safetensors: .* it lists none of this name"):
        read_capsule(capsule)


def test_what_is_no_capsule_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="capsule: found .* expected a capsule, .* capsules/step_N"):
            read_capsule(path)


def resealed(capsule: Path) -> Path:
    """The capsule with its checksums taken anew, as by somebody who changed it on purpose."""
    import hashlib

    lines = [f"{hashlib.sha256((capsule / name).read_bytes()).hexdigest()}  {name}\n" for name in FILES]
    (capsule / "SHA256SUMS").write_text("".join(lines))
    return capsule


def test_parts_of_two_runs_are_refused(capsule: Path, tmp_path: Path) -> None:
    other = parse_spec({**VALUES, "numerics": {"preset": "fp8_block_fp32"}})
    mine = (capsule / "spec.yaml").read_text()
    write_spec(RunDir(capsule), other.to_dict())
    with pytest.raises(UserError, match=r"capsule\.json: spec_digest: found .* of its spec\.yaml"):
        read_capsule(resealed(capsule))
    (capsule / "spec.yaml").write_text(mine)
    manifest = json.loads((capsule / "manifest.json").read_text())
    manifest["spec_digest"] = NumericsConfig(spec=other.numerics_config().spec).spec.digest()
    (capsule / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json: spec_digest: found .* of its capsule\.json"):
        read_capsule(resealed(capsule))


def test_another_format_is_refused(capsule: Path) -> None:
    about = json.loads((capsule / "capsule.json").read_text())
    (capsule / "capsule.json").write_text(json.dumps({**about, "format": 2}))
    with pytest.raises(UserError, match=r"capsule\.json: format: found 2, expected 1"):
        read_capsule(resealed(capsule))


def test_a_capsule_may_be_moved(capsule: Path, tmp_path: Path) -> None:
    shutil.move(capsule, tmp_path / "elsewhere")
    assert read_capsule(tmp_path / "elsewhere").step == 4
