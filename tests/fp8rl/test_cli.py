"""The commands beside `train`; what `train` refuses and does is in tests/e2e."""

import importlib.metadata
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8rl.cli import BESIDE, COMMANDS
from fp8rl.commands import runs
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import load_experiment
from fp8rl.run import Run
from tests.support.commands import invoke, result_of
from tests.support.paths import ROOT, new_run
from tests.support.tiny_model import TinyModel, write_tiny_model


def test_a_new_run_has_no_data_that_could_have_changed() -> None:
    code, said = invoke("train", "spec.yaml", "--accept-changed-data")
    assert code == 2 and said.startswith("error: --accept-changed-data: found no --resume")


def test_paths_in_arguments_and_options_may_begin_with_the_home_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert invoke("init", "~/mine")[0] == 0 and (tmp_path / "mine/spec.yaml").is_file()
    for arguments in (["report", "~/none"], ["runs", "--dir=~/none"], ["runs", "--dir", "~/none"]):
        assert f"{tmp_path}/none" in invoke(*arguments)[1]
    with pytest.raises(UserError, match=f"found '{tmp_path}/none'"):
        Run("~/none")


@pytest.mark.slow
def test_every_command_explains_itself() -> None:
    shown = [command.__name__ for commands in COMMANDS.values() for command in commands]
    names = shown + [command.__name__ for command in BESIDE]
    assert len(names) == len(set(names)) == 15
    page = " ".join(invoke("--help")[1].split())
    assert all(f"{name} (" in page for name in names[len(shown) :])
    for number, name in enumerate(names):
        code, printed = invoke(name, "--help" if number % 2 else "-h")
        assert code == 0 and f"fp8rl {name}" in printed.replace("root", "fp8rl")


def test_the_version_is_the_distributions() -> None:
    assert invoke("--version") == (0, f"fp8rl {importlib.metadata.version('fp8rl')}\n")


def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    code = "import fp8rl.cli, sys; print([m for m in ('torch', 'ray', 'transformers', 'wandb') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.slow
def test_the_driver_never_imports_megatron_or_sglang() -> None:
    code = (
        "import fp8rl.rl.experiment.preconditions, fp8rl.rl.run.run, fp8rl.rl.loop, fp8rl.rl.run.ending; "
        "import fp8rl.diagnose.doctor.pair, fp8rl.diagnose.explain, sys; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'megatron', 'sglang', 'apex'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_convert_writes_a_quantized_directory_once(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    assert invoke("convert", model, out)[0] == 2
    write_tiny_model(model, TinyModel(heads=4, kv_heads=2))
    code, printed = invoke("convert", model, out, "--preset", "fp8_block_fp32")
    assert code == 0, printed
    assert json.loads((out / "config.json").read_text())["quantization_config"]["weight_block_size"] == [128, 128]
    code, printed = invoke("convert", model, out)
    assert code == 2 and "does not exist yet" in printed


def test_the_demo_runs_the_example_anew_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(runs, "_train", lambda *arguments, **options: calls.append((*arguments, options)))
    monkeypatch.chdir(tmp_path)
    assert invoke("demo", "run.steps=2")[0] == 0
    ((spec, overrides, options),) = calls
    assert (overrides, options) == (["run.name=demo", "run.steps=2"], {"overwrite": True})
    experiment = load_experiment(spec)
    for path in (experiment.model.path, experiment.data.source(experiment.data.eval, "data.eval").path):
        assert Path(path).is_relative_to(ROOT / "examples") and Path(path).exists()


SERVER = "certify --server http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("serve {run}", "found {run}, a run without model/, expected a finished run"),
        ("serve {nothing}", "RUN|MODEL: found"),
        ("serve {model} --mode fast", "--mode: found fast, expected exact or native"),
        ("serve {model} --host 0.0.0.0", "--host: found 0.0.0.0, expected also an API key of your own"),
        ("serve {model} --host 8.8.8.8 --api-key k", "--host: found 8.8.8.8, expected an IPv4 address of this"),
        ("serve {model} --api-key é", "--api-key: found another text, expected printable ASCII"),
        ("serve {run} --mode native", "--mode: found native, expected none beside a run, which is served as it"),
        ("serve {converted}", "or what `fp8rl convert MODEL OUT --preset bf16` makes of it."),
        (f"{SERVER} --temperature 1 --top-p 0.5", "--temperature, --top-p"),
        ("certify dump.jsonl --seconds 9", "--seconds: found 9.0, expected none beside a dump"),
        ("convert m out --pad --preset bf16", "--preset: found bf16, expected none beside --pad"),
        ("runs --all", "--all: found True, expected none beside a list"),
        ("eval {run} model.path=other", "model.path: found model.path=other, expected no key of the model"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_or_would_change_nothing_is_refused(tmp_path, monkeypatch, command, expected) -> None:
    run = new_run(tmp_path / "it")
    run.experiment.write_text(load_experiment(ROOT / "examples/arithmetic.yaml").to_yaml())
    converted = tmp_path / "converted"
    converted.mkdir()
    (converted / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    monkeypatch.delenv("FP8RL_API_KEY", raising=False)
    places = {"converted": converted, "run": run.path, "nothing": tmp_path / "nothing"}
    places["model"] = ROOT / "examples/models/tiny_qwen3_moe"
    code, printed = invoke(*command.format(**places).split())
    assert code == 2 and expected.format(**places) in printed.replace("'", "")


@pytest.mark.parametrize(
    ("arguments", "variable", "shown"),
    [([], None, "made-up"), (["--api-key", "a;b"], None, "'a;b'"), ([], "mine", '"$FP8RL_API_KEY"')],
    ids=["none", "option", "variable"],
)
def test_serve_prints_a_line_for_another_shell(arguments, variable, shown, monkeypatch) -> None:
    """A key from the environment is not printed, as what is printed may be kept."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    @contextmanager
    def serve(served: object, log: object, say: object, port: object, host: object, api_key: str | None):
        endpoint = SimpleNamespace(url="http://127.0.0.1:1", api_key=api_key or "made-up")
        yield SimpleNamespace(endpoint=endpoint, check=interrupted)

    monkeypatch.setattr("fp8rl.serving.serve", serve)
    model = str(ROOT / "examples/models/tiny_qwen3_moe")
    result = result_of("serve", model, *arguments, env={"FP8RL_API_KEY": variable})
    line = f"export OPENAI_BASE_URL=http://127.0.0.1:1/v1 OPENAI_API_KEY={shown}    # model tiny_qwen3_moe"
    assert result.exit_code == 130 and line in result.output
