"""Checkpoints on one rank."""

from __future__ import annotations

import enum
import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItemType

from fp8rl.numerics.core.errors import UserError
from fp8rl.trainer.checkpoint import writer as checkpoint_writer
from fp8rl.trainer.checkpoint.checkpoint import JOINED
from fp8rl.trainer.checkpoint.files import (
    CONTENT,
    STATE,
    About,
    DamagedCheckpointError,
    check_digests,
    digests,
    read_about,
    write_about,
)
from fp8rl.trainer.checkpoint.pickles import read_metadata
from fp8rl.trainer.inventory import optimizer_state
from tests.fp8rl.test_forged import Planted
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import EXPERTS, LAYERS
from tests.support.trainers import MakeTrainer, save_checkpoint, stage_checkpoint, train
from tests.support.wire import flip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kept(moe_path: Path, tmp_path_factory: pytest.TempPathFactory, make_trainer: MakeTrainer) -> tuple[Any, Path]:
    """A trainer, and the checkpoint of its first step, of which a test changes a copy."""
    trainer, path = make_trainer(moe_path), tmp_path_factory.mktemp("kept") / "a"
    train(trainer, 0, 1)
    save_checkpoint(trainer, path, {})
    return trainer, path


@pytest.mark.parametrize(("model", "steps_before_loading"), [("moe", 2), ("linear", 0)])
def test_two_and_two_steps_equal_four(model, steps_before_loading, tmp_path, make_trainer, models) -> None:
    """Linear attention has parameters in FP32 beside those in BF16, and goes token by token."""
    size = {"rows": 3, "longest": 12} if model == "linear" else {}
    settings, path = {"decay": "cosine", "warmup_steps": 1, "weight_decay": 0.1}, models[model]
    straight = make_trainer(path, "fp8", **settings)
    expected = train(straight, 0, 2, **size)
    save_checkpoint(straight, tmp_path / "step_2", {"seed": 7, "cursor": [1, 2]})
    expected += train(straight, 2, 4, **size)
    resumed, batch = make_trainer(path, "fp8", **settings), random_batch(**size)
    train(resumed, 10, 10 + steps_before_loading, **size)  # a different past must leave no trace
    before = resumed.score(batch)[1]  # for which weights are quantized
    assert resumed.load(tmp_path / "step_2") == {"seed": 7, "cursor": [1, 2]}
    assert resumed.weight_version == 2 and not torch.equal(resumed.score(batch)[1], before)
    assert train(resumed, 2, 4, **size) == expected[2:]
    ours, theirs = (dict(t.model.named_parameters()) for t in (resumed, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_optimizer_without_parameters_counts_steps_of_the_others(moe_path: Path, make_trainer: MakeTrainer) -> None:
    """The experts' one of a pipeline stage whose layers have none."""
    trainer = make_trainer(moe_path, "bf16")
    train(trainer, 0, 2)
    dense, experts = trainer.optimizer.inner.chained_optimizers
    experts.optimizer = torch.optim.AdamW([{"params": [], "is_expert_parallel": True}])
    (group,) = experts.state_dict()["optimizer"]["param_groups"]
    assert group["step"] == 2 and group["is_expert_parallel"] and "params" not in group
    assert {group["step"] for group in dense.state_dict()["optimizer"]["param_groups"]} == {2}


@pytest.mark.parametrize(("wrote", "reads"), [("native", "exact"), ("exact", "native")])
def test_experts_that_are_one_parameter_and_parameters_of_their_own_have_the_same_checkpoints(
    wrote: str, reads: str, moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    """Native mode has a parameter for each, as exact mode had: with one key for all layers and experts."""
    first, second = make_trainer(moe_path, mode=wrote), make_trainer(moe_path, mode=reads)
    train(first, 0, 2)
    save_checkpoint(first, tmp_path / "a", {})
    found = FileSystemReader(tmp_path / "a" / STATE).read_metadata().state_dict_metadata
    for product, shape in (("linear_fc1", (256, 256)), ("linear_fc2", (256, 128))):
        for kept in ("", "optimizer.state.param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
            held = found[f"{kept}decoder.layers.mlp.experts.experts.{product}.weight"]
            assert tuple(held.size) == (LAYERS, EXPERTS, *shape)
    stored, exported = load_file(moe_path / "model.safetensors"), dict(second.weights.share(second.model))
    assert stored.keys() == exported.keys() and all(torch.equal(exported[name], stored[name]) for name in stored)
    second.load(tmp_path / "a")
    for (name, kind, ours), (other, _, theirs) in zip(*(_by_name(each) for each in (first, second)), strict=True):
        assert name == other and torch.equal(ours, theirs), (name, kind)
    ours, theirs = (dict(each.weights.share(each.model)) for each in (first, second))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _by_name(trainer: Any) -> list[tuple[str, str, torch.Tensor]]:
    return sorted((each for each in optimizer_state(trainer.optimizer) if each[1] != "rest"), key=lambda each: each[:2])


def test_a_checkpoint_of_weights_has_no_past(moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path, "fp8", lr=0.05)
    train(trainer, 0, 2)
    save_checkpoint(trainer, tmp_path / "all", {})
    save_checkpoint(trainer, tmp_path / "weights", {CONTENT: "weights"})
    sizes = {name: sum(size for size, _ in read_about(tmp_path / name).files.values()) for name in ("all", "weights")}
    assert sizes["weights"] < sizes["all"] / 5, "2 bytes a parameter, not 14"
    other = make_trainer(moe_path, "fp8", lr=0.05)
    train(other, 10, 12)
    assert other.load(tmp_path / "weights") == {CONTENT: "weights"} and other.weight_version == 2
    saved = dict(trainer.model.named_parameters())
    for name, weight in other.model.named_parameters():
        assert torch.equal(weight, saved[name]), name
    for name, kind, tensor in optimizer_state(other.optimizer):
        assert kind == "masters" or not bool(tensor.any()), name
    masters = sum(float(t.double().sum()) for _, kind, t in optimizer_state(other.optimizer) if kind == "masters")
    assert masters == sum(float(p.detach().double().sum()) for p in saved.values() if p.dtype == torch.bfloat16)
    assert other.optimizer.schedule.num_steps == 2


def test_what_is_written_beside_training_was_staged(moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path, "fp8")
    train(trainer, 0, 2)
    save_checkpoint(trainer, tmp_path / "at once", {"seed": 7})
    staged = stage_checkpoint(trainer, tmp_path / "elsewhere/beside", {"seed": 7})
    after = train(trainer, 2, 4)
    staged.publish([staged.write()])
    at_once, beside = (
        {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        for path in (tmp_path / "at once", tmp_path / "elsewhere/beside")
    )
    assert at_once == beside and len(at_once) >= 4
    trainer.load(tmp_path / "elsewhere/beside")
    assert train(trainer, 2, 4) == after


def test_what_is_unfinished_leaves_the_old_one(moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path)
    save_checkpoint(trainer, tmp_path / "last", {"n": 1})
    stage_checkpoint(trainer, tmp_path / "last", {"n": 2}).write()
    assert trainer.load(tmp_path / "last") == {"n": 1}
    save_checkpoint(trainer, tmp_path / "last", {"n": 3})
    assert [file.name for file in tmp_path.iterdir()] == ["last"] and trainer.load(tmp_path / "last") == {"n": 3}


@pytest.mark.parametrize("where", ["in memory", "on the disk"])
def test_a_bit_that_flips_before_a_checkpoint_has_its_name_is_found(
    where: str, moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(moe_path)
    save_checkpoint(trainer, tmp_path / "last", {"n": 1})
    staged = stage_checkpoint(trainer, tmp_path / "last", {"n": 2})
    (items,) = staged._plan.files.values()
    (masters,) = [item for item in items if item.index.fqn == "optimizer.state.param.output_layer.weight"]
    if where == "in memory":
        masters.data.view(torch.int32).view(-1)[7] ^= 1 << 3
    original = checkpoint_writer._write

    def write(file: Path, items: Any) -> Any:
        placed = original(file, items)
        (place,) = [result.storage_data for result in placed if result.index == masters.index]
        flip(file, place.offset + place.length // 2)
        return placed

    if where == "on the disk":
        monkeypatch.setattr(checkpoint_writer, "_write", write)
    with pytest.raises(OSError, match="last: found other bytes of .*output_layer.weight in __0_0.distcp") as error:
        staged.write()
    assert "\n" not in str(error.value) and trainer.load(tmp_path / "last") == {"n": 1}


def test_what_is_not_a_checkpoint_of_this_format_is_refused(kept: tuple[Any, Path], tmp_path: Path) -> None:
    trainer, path = kept
    shutil.copytree(path, tmp_path / "a")
    about = read_about(path)
    write_about(tmp_path / "a", replace(about, extra={**about.extra, JOINED: 2}))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/about.json").write_text(json.dumps({"format": 99}))
    for name, said in (("a", "joined_heads: found 2, expected 1"), ("b", "format"), ("none", "checkpoint")):
        with pytest.raises(UserError, match=said):
            trainer.load(tmp_path / name)


DAMAGE: dict[str, Any] = {
    "flipped": flip, "cut off": lambda file: file.write_bytes(file.read_bytes()[:-100]), "gone": Path.unlink,
    "of another step": lambda file: file.write_text(file.read_text().replace('"step": 1', '"step": 2')),
}  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "damages"),
    [("state/*.distcp", ("flipped", "cut off", "gone")), ("state/.metadata", ("flipped",)),
     ("state/common.pt", ("cut off",)), ("about.json", ("flipped", "cut off", "of another step"))],
)  # fmt: skip
def test_damage_is_not_loaded(pattern: str, damages: tuple[str, ...], kept: tuple[Any, Path], tmp_path: Path) -> None:
    trainer, whole = kept
    held = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    for damage in damages:
        shutil.copytree(whole, tmp_path / damage)
        check_digests(tmp_path / damage)
        file = next((tmp_path / damage).glob(pattern))
        DAMAGE[damage](file)
        for read in (trainer.load, check_digests):
            with pytest.raises(DamagedCheckpointError, match=re.escape(file.name)):
                read(tmp_path / damage)
    assert all(torch.equal(parameter, held[name]) for name, parameter in trainer.model.named_parameters())


def test_weights_are_made_from_the_masters(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path, "fp8")
    trainer.train_step(random_batch(), cross_entropy(random_batch()))
    trained = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    for parameter in trainer.model.parameters():
        parameter.data.zero_()
    trainer.optimizer.write_weights()
    assert all(torch.equal(parameter, trained[name]) for name, parameter in trainer.model.named_parameters())


def _forged(kind: str, checkpoint: Path, ran: Path) -> None:
    """Put a pickle that runs code into a checkpoint, with digests that are right."""
    state = checkpoint / STATE
    found: Any = FileSystemReader(state).read_metadata()
    match kind:
        case "metadata":
            found = Planted(ran)
        case "a value in the metadata":
            found.planner_data = Planted(ran)
        case "common":
            torch.save({"step": Planted(ran)}, state / "common.pt")
        case "tensors":
            torch.save(Planted(ran), file := state / "planted.distcp")
            place = _StorageInfo(file.name, 0, file.stat().st_size)
            found.storage_data = dict.fromkeys(found.storage_data, place)
        case "a file elsewhere":
            found.storage_data = {
                index: _StorageInfo("../../a/state/__0_0.distcp", place.offset, place.length)
                for index, place in found.storage_data.items()
            }
    if kind != "common":
        (state / ".metadata").write_bytes(pickle.dumps(found))
    about = read_about(checkpoint)
    names = {str(file.relative_to(checkpoint)) for file in state.iterdir()}
    write_about(checkpoint, About(about.step, about.extra, digests(checkpoint, sorted(names))))


@pytest.mark.parametrize("kind", ["metadata", "a value in the metadata", "common", "tensors", "a file elsewhere"])
def test_no_code_of_it_runs(kind: str, kept: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trainer, whole = kept
    shutil.copytree(whole, tmp_path / "a")
    _forged(kind, tmp_path / "a", tmp_path / "ran")
    with pytest.raises(UserError, match="checkpoint .*a: found"):
        trainer.load(tmp_path / "a")
    assert not (tmp_path / "ran").exists()


class _AsOlderPythons(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.2 does, Debian 12's."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_metadata_that_another_python_has_written_are_read(kept: tuple[Any, Path], tmp_path: Path) -> None:
    _, whole = kept
    found = FileSystemReader(whole / STATE).read_metadata()
    with (tmp_path / ".metadata").open("wb") as file:
        _AsOlderPythons(file).dump(found)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes() and read_metadata(tmp_path / ".metadata") == found


@pytest.mark.parametrize(("owner", "name"), [(Path, "touch"), (enum.Enum, "__new__"), (WriteItemType, "mro")])
def test_no_attribute_but_a_member_of_an_enumeration_is_read(owner: type, name: str, tmp_path: Path) -> None:
    class Attribute:
        def __reduce__(self) -> Any:
            return getattr, (owner, name)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(pickle.UnpicklingError, match="a pickle that names"):
        read_metadata(tmp_path / ".metadata")
