"""Folders of somebody else's, with code wherever a library might run it: no command that looks at them does."""

import json
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml

from fp8rl.diagnose import explain
from fp8rl.diagnose.subject import read_served
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.files import write_atomically
from fp8rl.rl.experiment import Experiment, load_experiment
from fp8rl.rl.record.rollouts import RolloutRecord, write_rollouts
from fp8rl.run import Run
from fp8rl.trainer.checkpoint.files import STATE, About, digests, write_about
from tests.support.commands import invoke
from tests.support.paths import EXAMPLES, new_run
from tests.support.ranks import WARM


class Planted:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture
def forged(tmp_path: Path, ran: Path):
    """A run whose spec names code, beside checkpoints, a model, a capsule and rollouts with pickles."""
    code = tmp_path / "code.py"
    code.write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\ndef Loss(answer, reference): return 0.0\n")
    run = new_run(tmp_path / "runs/forged")
    spec = load_experiment(EXAMPLES / "arithmetic.yaml", ["run.steps=2"]).to_dict()
    loss = f"{code}:Loss"
    named = {"algorithm": {"name": loss}, "rewards": [{"function": loss}], "environment": {"function": loss}}
    run.experiment.write_text(yaml.safe_dump(spec | named))
    write_atomically(run.metrics, json.dumps({"step": 2, "rollout/reward_mean": 0.5}) + "\n")
    record = RolloutRecord("1+1=?", "2", 1.0, 0.0, 0, 7, True, [1, 2], [3], [-0.5], [-0.5], [2], 1.0)
    write_atomically(run.rollouts(2), "")
    write_rollouts(run.rollouts(2), [record])
    state = run.checkpoint(2) / STATE
    state.mkdir(parents=True)
    for name in ("common.pt", "__0_0.distcp"):
        torch.save(Planted(ran), state / name)
    (state / ".metadata").write_bytes(pickle.dumps(Planted(ran)))
    (state / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    names = [f"{STATE}/{file.name}" for file in state.iterdir()]
    write_about(run.checkpoint(2), About(2, {}, digests(run.checkpoint(2), names)))
    plant_model(run.model, code, ran)
    run.capsule(2).mkdir(parents=True)
    shutil.copy(run.experiment, run.capsule(2))
    (run.capsule(2) / "capsule.json").write_bytes(pickle.dumps(Planted(ran)))
    return run


def plant_model(path: Path, code: Path, ran: Path) -> None:
    """A model directory that asks for code of its own, with pickled weights."""
    shutil.copytree(EXAMPLES / "models/tiny_qwen3_moe", path, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(code, path / "code.py")
    asked = {"AutoConfig": "code.Loss", "AutoModelForCausalLM": "code.Loss", "AutoTokenizer": ["code.Loss"] * 2}
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((path / name).read_text()) | {"auto_map": asked, "tokenizer_class": "Loss"}
        (path / name).write_text(json.dumps(values))
    for name in ("pytorch_model.bin", "adapter_model.bin", "model.pt"):
        torch.save({"weight": Planted(ran)}, path / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [*("report RUN", "runs --dir RUN/..", "runs RUN RUN", "certify RUN", "explain --quick RUN/capsules/step_2"),
     *("explain RUN/capsules/step_2", "serve RUN", "serve RUN/model", "eval RUN/model --set DATA"),
     *("convert RUN/model RUN/../out", "certify RUN/model/pytorch_model.bin --model RUN/model"),
     "certify RUN/checkpoints/step_2/state/.metadata --model RUN/model"],
)  # fmt: skip
def test_no_command_runs_what_it_looks_at(command, forged, ran, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = str(EXAMPLES / "data/arithmetic_eval.jsonl")
    arguments = command.replace("RUN", str(forged.path)).replace("DATA", data).split()
    # It becomes a rank of the trainer, which this process may be already.
    exit_code, output = _invoke_in_a_process(arguments) if command == "certify RUN" else invoke(*arguments)
    assert not ran.exists()
    assert exit_code in (0, 2), output


def _invoke_in_a_process(arguments: list[str]) -> tuple[int, str]:
    with ProcessPoolExecutor(1, mp_context=WARM) as pool:
        return pool.submit(invoke, *arguments).result(timeout=120)


@pytest.mark.parametrize("command", ["report RUN", "runs --dir RUN/..", "runs RUN RUN"])
def test_who_looks_at_a_run_does_not_import_its_architecture(command, forged, ran, tmp_path) -> None:
    values = yaml.safe_load(forged.experiment.read_text())
    values["model"]["architecture"] = str(tmp_path / "code.py")
    values["numerics"] |= {"mode": "native", "rollout": "bf16", "scope": ["a_kind_of_its_own"]}
    forged.experiment.write_text(yaml.safe_dump(values))
    exit_code, output = invoke(*command.replace("RUN", str(forged.path)).split())
    assert exit_code == 0 and not ran.exists(), output
    assert Run(forged.path).spec.model.architecture is not None and not ran.exists()
    with pytest.raises(UserError, match="ARCHITECTURE = None"):
        read_served(forged.path, "exact", "fp8_block_pow2")
    assert ran.exists(), "what computes with its model imports it"


def test_an_explanation_starts_with_nothing_that_a_run_names(forged, ran, monkeypatch) -> None:
    started = []

    def refused(experiment: Experiment, *_: object) -> None:
        started.append(experiment)
        raise UserError("nothing is started here")

    monkeypatch.setattr(explain, "open_pair", refused)
    assert invoke("explain", forged.path)[0] == 2 and not ran.exists()
    (experiment,) = started
    assert str(ran.parent / "code.py") not in json.dumps([experiment.rewards, experiment.environment], default=str)
