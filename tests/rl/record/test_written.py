"""A run removes what a run wrote, and nothing that anybody else has put beside it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.record.run_dir import RunDir, open_run_dir
from fp8rl.rl.record.written import CHECKPOINT, RUN, foreign_files, remove_written

WRITTEN = (
    "spec.yaml metrics.jsonl events.jsonl sessions.jsonl log.txt report.html attribution.html certify.html "
    "engine_0.log teacher_1.log checkpoints/step_2/about.json checkpoints/step_2/groups.jsonl "
    "checkpoints/step_2/state/.metadata "
    "checkpoints/step_2/state/__0_0.distcp checkpoints/..step_4.pending.partial/state/common.pt manifests/step_0.json "
    "rollouts/step_1.jsonl rollouts/ahead_1.jsonl capsules/step_3/capsule.json "
    "capsules/step_3/spec.yaml capsules/step_3/SHA256SUMS "
    "capsules/step_3/weights/model-00001-of-00002.safetensors capsules/.step_4.partial/tensors.safetensors "
    "model/config.json model/model.safetensors adapter/adapter_model.safetensors .metrics.jsonl.partial "
    "served/start/config.json ray_logs/raylet.out wandb/run_id wandb/offline-run-20261125_023255-d99b2f73/debug.log "
    "tensorboard/events.out.tfevents.1.host trackio/run.db mlflow/mlflow.db "
    "wandb/told tensorboard/told mlflow/told trackio/told "
    "wandb/log.txt tensorboard/log.txt trackio/log.txt mlflow/log.txt"
).split()
"""One of each that a run of 6555c90 and its trackers leave."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with one of each, whose model had a licence and code beside its weights."""
    fill(tmp_path / "base", "LICENSE", "code/more.py")
    files = RunDir(tmp_path / "runs/demo")
    fill(files.path, *WRITTEN, "model/LICENSE", "model/code/more.py", "capsules/step_3/weights/LICENSE")
    files.metrics.write_text('{"step": 0, "sync/bytes": 1.0}\n')
    (files.path / "wandb/latest-run").symlink_to("offline-run-20261125_023255-d99b2f73")
    files.write_experiment(yaml.safe_dump({"model": {"path": str(tmp_path / "base")}}))
    return files


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"of {Path(name).name}")


def names(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def opened(run: RunDir, **flags: object) -> None:
    with open_run_dir(run.path.parent, run.name, **flags):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("marked", [True, False])
def test_a_run_is_removed_whole(run: RunDir, marked: bool) -> None:
    if not marked:  # as runs were before they marked their folders
        run.mark.unlink()
    opened(run, overwrite=True)
    assert names(run.path) == [".fp8rl"]


@pytest.mark.parametrize(
    "name",
    "notes.md data.jsonl reward.py spec.yml checkpoints/best.txt checkpoints/step_2/notes checkpoints/step_2_best/x "
    "rollouts/mine.ipynb manifests/a.json capsules/step_3/why.md model/README.md model/code/mine.py wandb/notes "
    "tensorboard/notes log.txt.bak .git/config served/x engine_0.log.gz metrics.jsonl.1 wandb.md model.py".split(),
)
def test_what_no_run_wrote_is_named_and_nothing_is_removed(run: RunDir, name: str) -> None:
    fill(run.path, name)
    before = names(run.path)
    with pytest.raises(UserError, match="which no run wrote"):
        opened(run, overwrite=True)
    assert names(run.path) == before and len(run.foreign_files()) == 1


def _edit_copied(run: RunDir) -> None:
    (run.model / "LICENSE").write_text("mine")


def _edit_spec(run: RunDir) -> None:
    run.experiment.write_text(run.experiment.read_text() + "# mine\n")


def _link(run: RunDir) -> None:
    (run.path.parent / "elsewhere").mkdir()
    run.report.unlink()
    run.report.symlink_to(run.path.parent / "elsewhere")


def _folder(run: RunDir) -> None:
    run.log.unlink()
    run.log.mkdir()


def _empty_folder(run: RunDir) -> None:
    (run.path / "later").mkdir()


@pytest.mark.parametrize("change", [_edit_copied, _edit_spec, _link, _folder, _empty_folder])
def test_a_users_change_is_a_users_file(run: RunDir, change: Callable[[RunDir], None]) -> None:
    change(run)
    before = names(run.path)
    with pytest.raises(UserError, match="which no run wrote"):
        opened(run, overwrite=True)
    assert names(run.path) == before


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}])
@pytest.mark.parametrize("beside", [[], ["notes.md"], ["model/config.json", "model/model.safetensors"]])
def test_a_folder_that_a_user_made_is_no_run(tmp_path: Path, flags: dict[str, bool], beside: list[str]) -> None:
    """Their spec, and what they keep with it, even under names that a run would give."""
    run = RunDir(tmp_path / "demo")
    fill(run.path, "spec.yaml", *beside)
    before = names(run.path)
    with pytest.raises(UserError, match=r"spec\.yaml.* in .*/demo, which no run wrote"):
        opened(run, reads=[run.experiment], **flags)
    assert names(run.path) == before


def test_the_spec_that_is_trained_from_stays(run: RunDir) -> None:
    _edit_spec(run)
    text = run.experiment.read_text()
    with (
        pytest.raises(KeyboardInterrupt),
        open_run_dir(run.path.parent, run.name, overwrite=True, reads=[run.experiment]) as files,
    ):
        assert names(run.path) == [".fp8rl", "spec.yaml"]
        files.write_experiment("resolved")
        raise KeyboardInterrupt
    assert run.experiment.read_text() == text


@pytest.mark.parametrize("name", ["model", "rollouts/step_1.jsonl", "capsules/step_3/spec.yaml"])
def test_what_a_run_is_made_from_is_not_removed_for_it(run: RunDir, name: str) -> None:
    with pytest.raises(UserError, match="an input of this run"):
        opened(run, overwrite=True, reads=[run.path / name])
    assert (run.path / name).exists()


def test_what_comes_meanwhile_outlives_a_start_that_is_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_run_dir(tmp_path, "demo") as files:
        fill(files.path, "log.txt", "served/start/config.json", "notes.md")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["demo", "demo/notes.md"]


def test_an_empty_folder_of_the_users_stays_with_its_mode(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir(mode=0o750)
    with pytest.raises(KeyboardInterrupt), open_run_dir(tmp_path, "demo"):
        raise KeyboardInterrupt
    assert (tmp_path / "demo").stat().st_mode & 0o777 == 0o750 and names(tmp_path) == ["demo"]


def test_a_resumed_run_does_not_write_over_a_users_model_card(run: RunDir) -> None:
    opened(run, resume=True)
    fill(run.model, "README.md")
    with pytest.raises(UserError, match=r"model/README\.md in"):
        opened(run, resume=True)


def test_a_checkpoint_goes_but_for_notes_and_links(run: RunDir, tmp_path: Path) -> None:
    step = run.checkpoint(2)
    fill(step, "notes.md")
    remove_written(step, CHECKPOINT)
    assert names(step) == ["notes.md"]
    kept = run.checkpoint(5)
    kept.symlink_to(tmp_path / "base")
    remove_written(kept, CHECKPOINT)
    assert kept.is_symlink() and names(tmp_path / "base")


def test_another_disk_in_the_way_is_left(run: RunDir) -> None:
    """Every directory of a run lies on its disk: what is mounted there is somebody else's."""
    mounted = Path("/dev/shm")
    if mounted.stat().st_dev == run.path.stat().st_dev:
        pytest.skip("there is no second disk")
    assert foreign_files(Path("/dev"), {"shm": RUN}).count(mounted) == 1


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o700), (True, 0o755)])
def test_a_new_run_is_its_owners_unless_it_is_shared(tmp_path: Path, shared: bool, mode: int) -> None:
    with open_run_dir(tmp_path / "runs", "demo", shared=shared) as files:
        assert files.path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("kind", ["link", "text"])
def test_a_file_of_the_locks_name_is_not_cut(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    lock = tmp_path / ".demo.lock"
    if kind == "link":
        lock.symlink_to(precious)
    else:
        lock.write_text("mine")
    with pytest.raises(UserError, match=r"\.demo\.lock"):
        opened(RunDir(tmp_path / "demo"))
    assert lock.read_text() == "mine"
