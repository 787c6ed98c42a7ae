"""Names of the hub in a spec, with the real clients and a server on this machine that speaks the hub's protocol."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from fp8rl.diagnose.plan.subject import read_plan_subject
from fp8rl.models.hub import is_hub_name, model_directory
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment, load_experiment, read_resolved
from fp8rl.rl.experiment.contents import fetched
from fp8rl.rollout.tasks.data import load_problems
from tests.support.hub_server import TOKEN, Hub, Repository, hub_server
from tests.support.paths import EXAMPLES

pytestmark = pytest.mark.slow

MODEL, DATA = "owner/Tiny-0.1B", "owner/sums"
CARD = b"""---
configs:
- {config_name: main, data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]}
- {config_name: hard, data_files: [{split: train, path: hard/train-*}]}
---
"""
SPEC = {
    "run": {"name": "a"},
    "model": {"path": MODEL},
    "data": {"train": {"path": DATA, "name": "main", "split": "train"}, "eval": {"path": DATA, "name": "hard"}},
    "eval": {"sets": [{"name": "tests", "path": DATA, "subset": "main", "split": "test"}]},
}


def rows(count: int) -> bytes:
    return b"".join(b'{"question": "1+%d=?", "answer": "#### %d"}\n' % (n, n + 1) for n in range(count))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as hub:
        point_to(hub.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        files = {file.name: file.read_bytes() for file in (EXAMPLES / "models/tiny_qwen2").iterdir()}
        model, data = Repository(), Repository()
        model.commit({**files, "onnx/model.safetensors": b"not ours", "pytorch_model.bin": b"nor this"})
        data.commit({"README.md": CARD, **{f"{name}-0.jsonl": rows(n) for name, n in SHARDS.items()}})
        hub.repositories |= {f"models/{MODEL}": model, f"datasets/{DATA}": data}
        yield hub


SHARDS = {"main/train": 3, "main/test": 2, "hard/train": 5}


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def spec(folder: Path, **sections: object) -> Experiment:
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC | sections))
    return load_experiment(folder / "spec.yaml")


def test_names_are_fetched_and_pinned_and_a_run_goes_on_with_its_commits(hub: Hub, tmp_path: Path) -> None:
    experiment = fetched(spec(tmp_path))
    model, data = hub.repositories[f"models/{MODEL}"], hub.repositories[f"datasets/{DATA}"]
    (first,), (problems,) = model.revisions, data.revisions
    assert experiment.model.revision == first and experiment.data.train[0].revision == problems
    ours = {file.name for file in experiment.model.directory.iterdir()}
    assert ours == {file.name for file in (EXAMPLES / "models/tiny_qwen2").iterdir()} - {"README.md"}
    sources = [*experiment.data.training, experiment.data.source(experiment.eval.sets[0], "eval.sets.0")]
    assert [len(load_problems(each)) for each in sources] == [3, 2]
    assert len(load_problems(experiment.data.source(experiment.data.eval, "data.eval"))) == 5

    (tmp_path / "resolved.yaml").write_text(experiment.to_yaml())
    before = read_resolved(tmp_path / "resolved.yaml")
    assert before == experiment and f"revision: {first}" in experiment.to_yaml()
    later = model.commit({**model.revisions[first], "config.json": b"{}"})
    hub.asked.clear()
    assert fetched(spec(tmp_path), before) == experiment
    assert hub.asked == []  # all of it is in the cache
    assert fetched(spec(tmp_path)).model.revision == later
    assert fetched(spec(tmp_path, model={"path": MODEL, "revision": "main"}), before).model.revision == later


def test_a_configuration_is_fetched_without_the_others(hub: Hub, tmp_path: Path) -> None:
    experiment = fetched(spec(tmp_path, data={"train": SPEC["data"]["train"]}, eval={"problems": 0}))  # type: ignore[index]
    assert len(load_problems(experiment.data.training[0])) == 3
    assert not [path for path in hub.asked if "hard/train" in path]


def test_a_path_that_exists_wins_and_what_looks_like_a_path_is_never_asked_for(hub: Hub, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "models/tiny_qwen2", tmp_path / MODEL)
    experiment = spec(tmp_path, data={"train": "data/none.jsonl"}, eval={"problems": 0})
    assert experiment.model.path == str(tmp_path / MODEL) and experiment.model.directory == tmp_path / MODEL
    assert fetched(experiment) == experiment
    for text in ("~/name", "owner", "a/b/c", "../name"):
        assert not is_hub_name(text)
        assert os.path.isabs(spec(tmp_path, model={"path": text}).model.path)
    assert hub.asked == []


def test_a_plan_reads_the_configuration_alone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for subject in (MODEL, str(tmp_path / "spec.yaml")):
        spec(tmp_path)
        assert read_plan_subject(subject).shape.sizes.layers == 2
    assert {path.rpartition("/")[2] for path in hub.asked if "resolve" in path} == {"config.json"}
    point_to("http://127.0.0.1:9", monkeypatch)
    assert read_plan_subject(MODEL).shape.sizes.layers == 2
    with pytest.raises(UserError, match="not complete in the cache"):
        model_directory(MODEL, None, "model.path")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"path": "owner/Tiny"}}, "model.path: found owner/Tiny, no directory here.*HF_TOKEN"),
        ({"model": {"path": "owner/empty"}}, "found owner/empty without config.json, expected a model"),
        ({"model": {"path": "owner/gated"}}, "owner/gated, a model that .*Ask for access.*HF_TOKEN"),
        ({"model": {"path": MODEL, "revision": "v2"}}, "model.revision: found v2.*a branch, tag or commit"),
        ({"model": {"path": "./here", "revision": "v2"}}, "model.revision: found 'v2', expected none, as .*here is"),
        ({"data": {"train": "owner/none"}}, "data.train: found owner/none, no file or directory here"),
        ({"data": {"train": DATA}}, "data.train.name: found None, expected one of main, hard"),
    ],
)
def test_what_the_hub_does_not_give_is_one_message(changes: dict, message: str, hub: Hub, tmp_path: Path) -> None:
    gated = hub.repositories["models/owner/gated"] = Repository(gated=True)
    gated.commit({"config.json": b"{}", "model.safetensors": b""})
    (empty := Repository()).commit({"README.md": b""})
    hub.repositories["models/owner/empty"] = empty
    with pytest.raises(UserError, match=message) as caught:
        fetched(spec(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_token_opens_a_gated_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = hub.repositories["models/owner/gated"] = Repository(gated=True)
    gated.commit({"config.json": b"{}"})
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (model_directory("owner/gated", None, "model.path") / "config.json").is_file()


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_the_cache_serves_and_what_it_lacks_is_said(
    offline: bool, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = fetched(spec(tmp_path))
    point_to("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    assert fetched(spec(tmp_path)) == experiment
    shutil.rmtree(experiment.model.directory.parents[1] / "trees")  # as other programs leave the cache
    assert fetched(spec(tmp_path)) == experiment
    why = "HF_HUB_OFFLINE is set" if offline else "not available from http://127.0.0.1:9"
    for changes in ({"model": {"path": "owner/Other"}}, {"data": {"train": "owner/other"}}):
        with pytest.raises(UserError, match=f"found owner/[Oo]ther.*no path.*{why}.* to the spec's folder.*hf down"):
            fetched(spec(tmp_path, **changes))
