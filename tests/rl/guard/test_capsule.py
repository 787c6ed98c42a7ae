"""What a capsule keeps, and how a damaged one is refused. Real rescorings are in tests/e2e/test_gates.py."""

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.guard.capsule import read_capsule, remove_superfluous
from tests.support.scored_batches import CapsuleRun, scored_batch


@pytest.fixture
def capsule(tmp_path: Path) -> Path:
    return CapsuleRun.make(tmp_path).write(4, ["resync: because"], scored_batch([0.0], [0.5, -1.0]), [1, 0])


def test_the_worst_rows_come_first_and_non_finite_ones_before_all() -> None:
    seen = scored_batch([0.1, 0.0], [0.0, -0.4, 0.0], [0.0], [math.nan, 0.0], [0.2, 0.2], [-math.inf])
    assert seen.worst_rows(4) == [3, 5, 1, 4]
    assert seen.worst_rows(99) == [3, 5, 1, 4, 0, 2]
    assert seen.abs_differences()[0, 2].item() == pytest.approx(0.1) and seen.abs_differences()[0, 0] == 0


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    run = CapsuleRun.make(tmp_path)
    run = dataclasses.replace(run, numerics=dataclasses.replace(run.numerics, trainer="bf16"))
    seen = scored_batch([0.0], [0.5, math.nan, 0.25], [1.0, 0.0])
    path = run.write(4, ["one", "two"], seen, [1, 2], 1.5)
    assert run.files.capsule_steps() == [4]
    read = read_capsule(path)
    assert (read.about.step, read.about.why, read.about.rows, read.about.tis_cap) == (4, ["one", "two"], [1, 2], 1.5)
    assert read.numerics == run.numerics and read.experiment == run.experiment
    assert read.manifest.entries == {"a.weight": "1234@3"}
    assert read.weights is not None and (read.weights / "model.safetensors").read_bytes() == b"weights"

    chosen, back = seen.select([1, 2]), read.scored
    assert chosen.batch.width == 5 and back.version == 3 and back.batch.replay and back.batch.temperature == 0.7
    for name in ("tokens", "lengths", "loss_mask", "routes"):
        assert torch.equal(getattr(back.batch, name), getattr(chosen.batch, name))
    for name in ("rollout_logprobs", "advantages"):
        assert torch.equal(back.batch.fields[name], chosen.batch.fields[name])
    assert torch.equal(back.versions, chosen.versions) and torch.equal(back.routes, chosen.routes)
    assert torch.equal(back.logprobs.view(torch.int32), chosen.logprobs.view(torch.int32)), "NaN included"
    assert read.about.metrics == back.metrics() == dataclasses.replace(chosen, tis_cap=1.5).metrics()
    assert read.about.metrics["mismatch/nonfinite_count"] == 1 and read.about.metrics["mismatch/tokens"] == 4


@pytest.mark.parametrize(("mode", "start"), [("separate", "adapter"), ("merged", None)])
def test_adapters_begin_where_a_capsule_has_them(mode: str, start: str | None, capsule: Path, tmp_path: Path) -> None:
    read = read_capsule(capsule)
    assert read.beginning(tmp_path).model.path == str(tmp_path) and read.beginning(tmp_path).adapter is None
    adapted = read.experiment.model_copy(update={"adapter": AdapterSection(mode=mode)})
    adapter = dataclasses.replace(read, experiment=adapted).beginning(tmp_path).adapter
    assert adapter == (AdapterSection(mode=mode, start=str(tmp_path / start)) if start else None)


@pytest.mark.parametrize(
    ("held", "wrong"),
    [((), None), ([{"a.weight": "1234@3"}], []), ([{"a.weight": "1234@3"}, {"a.weight": "1234@2"}], ["a.weight"])],
)
def test_what_an_engine_held_otherwise_is_named(held: Any, wrong: list[str] | None, tmp_path: Path) -> None:
    path = CapsuleRun.make(tmp_path).write(1, [], scored_batch([0.0]), [0], held=held)
    assert read_capsule(path).about.wrong == wrong


def test_the_first_capsule_and_the_newest_stay(tmp_path: Path) -> None:
    run = CapsuleRun.make(tmp_path)
    kept = []
    for step in (2, 4, 5, 7):
        assert read_capsule(run.write(step, [], scored_batch([0.0]), [0], weights=False)).weights is None
        remove_superfluous(run.files, keep=3)
        kept.append(run.files.capsule_steps())
    assert kept == [[2], [2, 4], [2, 4, 5], [2, 5, 7]]
    run.files.cut(5)
    run.write(6, [], scored_batch([0.0]), [0])
    remove_superfluous(run.files, keep=3)
    assert run.files.capsule_steps() == [2, 5, 6], "a resumed run repeats the steps after 5"


def test_a_failure_leaves_no_capsule(tmp_path: Path) -> None:
    run = CapsuleRun.make(tmp_path)
    with pytest.raises(FileNotFoundError):
        run.write(2, [], scored_batch([0.0]), [0], manifest=tmp_path / "absent")
    assert list(run.files.capsules.iterdir()) == []


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


def test_what_is_no_capsule_or_lacks_a_checksum_is_refused(capsule: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="capsule: found .* expected a capsule, .* capsules/step_N"):
            read_capsule(path)
    sums = capsule / "SHA256SUMS"
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if "tensors" not in line))
    with pytest.raises(UserError, match="capsule file .*tensors.safetensors: .* SHA-256 of no file of this name"):
        read_capsule(capsule)


FORGED: list[tuple[str, Any]] = [
    *(("format", 2), ("step", 10**30), ("why", 1.5), ("rows", "x"), ("tis_cap", -1), ("weight_version", {})),
    *(("temperature", -1.0), ("metrics", {"mismatch/k3_kl": "x"}), ("numerics", {})),
]


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), FORGED, ids=str)
def test_a_capsule_of_right_digests_and_wrong_values_is_refused(capsule: Path, key: str, value: Any) -> None:
    about = json.loads((capsule / "capsule.json").read_text())
    (capsule / "capsule.json").write_text(json.dumps(about | {key: value}))
    sums = [f"{hashlib.sha256((capsule / name).read_bytes()).hexdigest()}  {name}\n" for name in FILES]
    (capsule / "SHA256SUMS").write_text("".join(sums))
    with pytest.raises(UserError, match="capsule.json"):
        read_capsule(capsule)
