"""Loading, inheriting, overriding and refusing experiment specs."""

import functools
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.algorithms import ALGORITHMS
from fp8rl.rl.experiment import load_experiment, parse_experiment, read_resolved
from fp8rl.rl.experiment.validation import REMOVED
from tests.support.experiments import experiment


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a YAML file into a folder that is the current directory."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


BASE = """
    run: {name: base, steps: 10, seed: 3}
    model: {path: m}
    data: {train: t}
    trainer: {lr: 1e-3}
    gates: [{metric: mismatch/k3_kl, above: 0.1}]
"""


def message(values: dict) -> str:
    with pytest.raises(UserError) as error:
        experiment(**values)
    return str(error.value)


def gate(metric: str, **fields: Any) -> dict[str, Any]:
    return {"gates": [{"metric": metric, "above": 1.0, **fields}]}


def grpo(**settings: Any) -> dict[str, Any]:
    return {"algorithm": {"name": "grpo", **settings}}


def test_sections_that_are_missing_are_named_by_the_keys_that_they_need() -> None:
    with pytest.raises(UserError) as error:
        parse_experiment({"run": {"name": "x"}})
    keys = [line.split(": ")[0] for line in str(error.value).splitlines()]
    assert keys == ["model.path", "data.train"]


def test_a_removed_key_is_refused_in_a_sentence_and_left_out_of_an_old_run(write, monkeypatch) -> None:
    monkeypatch.setitem(REMOVED, "rollout.gone", "Set rollout.engines.")
    said = "rollout.gone: found {'a': 1}, expected nothing: this key has gone, see CHANGELOG.md. Set rollout.engines."
    assert message({"rollout": {"gone": {"a": 1}}}) == said
    path = write("s.yaml", BASE)
    with pytest.raises(UserError, match=re.escape(said)):
        load_experiment(path, ["rollout.gone.a=1"])
    spec = load_experiment(path)
    written = spec.to_yaml().replace("\nrollout:", "\nrollout:\n  gone: {a: 1}")
    old = write("old/spec.yaml", written.replace("\ngates:", "\ngates:\n- {metric: tracking/wandb_lost, above: 0.0}"))
    write("old/.fp8rl", "")  # which marks the folder of a run
    assert "gone: {" in old.read_text() and read_resolved(old) == spec == load_experiment(old)


def test_file_inherits_merges_and_overrides_win(write):
    write("base.yaml", BASE)
    write("more.yaml", "defaults: base.yaml\nrun: {steps: 20}\nrollout: {engines: 2}")
    child = "defaults: [../base.yaml, ../more.yaml]\nrun: {name: child}\ngates: []\ntrainer: {tp: 2}"
    path = write("sub/child.yaml", child)
    gates = "gates=[{metric: train/loss, below: 0.5}]"
    spec = load_experiment(path, ["run.seed=7", "trainer.lr=2e-5", "algorithm={name: sft, batch_size: 4}", gates])
    assert (spec.run.name, spec.run.steps, spec.run.seed) == ("child", 20, 7)
    assert (spec.trainer.lr, spec.trainer.tp, spec.rollout.engines) == (2e-5, 2, 2)
    assert [gate.below for gate in spec.gates] == [0.5] and spec.algorithm.batch_size == 4
    assert load_experiment(path).gates == ()


def test_defaults_that_form_a_cycle_and_missing_files_are_refused(write):
    write("a.yaml", "defaults: b.yaml")
    write("b.yaml", "defaults: a.yaml")
    for name, said in (("a.yaml", "cycle"), ("absent.yaml", "absent.yaml")):
        with pytest.raises(UserError, match=said):
            load_experiment(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: [unclosed", "s.yaml.*line 2.*valid YAML"),
        ("run: {steps: 1, steps: 2}", "duplicate"),
        ("a: !!python/object/apply:os.system ['true']", "valid YAML"),
        ("- 1", "found \\[1\\], expected a mapping"),
        ("1: {a: 2}", "found 1, expected a mapping"),
        ("# run: {steps: 1}", "found 'nothing', expected a mapping"),
        ("defaults: 3", "list of file names"),
        ("defaults: absent.yaml", "found 'absent.yaml', expected an existing YAML file, relative to this one"),
    ],
)
def test_broken_files_are_refused(write, text, expected):
    with pytest.raises(UserError, match=expected):
        load_experiment(write("s.yaml", text))


@pytest.mark.parametrize(
    "override",
    [
        *("run.seed=" + "9" * 5000, "environment.kwargs={a: [0x" + "f" * 5000 + "]}"),
        *("data.system_prompt=\udc80", 'data.system_prompt="\\udc80"', "data.train=" + "x" * 300),
        *("trainer=3", "gates=3", "run.name.x=3", "run.name=[a", "trainer.lr.x=1"),
        *("run.steps", "=3", "run..steps=3", "--run.steps=3", "gates.0.above=1"),
    ],
    ids=lambda text: text[:20].encode("ascii", "replace").decode(),
)
def test_what_no_key_can_mean_is_the_users_error(write, override):
    with pytest.raises(UserError, match="found .*expected"):
        load_experiment(write("s.yaml", BASE), [override])


@pytest.mark.parametrize(
    ("value", "comment"), [("#1", "#1"), ("Schließe mit 😀 #x", "#x"), ("'a' # b", "# b"), ("it's #1", "#1")]
)
def test_a_value_that_yaml_would_cut_at_a_comment_is_refused(write, value, comment):
    with pytest.raises(UserError) as error:
        load_experiment(write("s.yaml", BASE), [f"data.system_prompt={value}"])
    assert f"it takes '{comment}' for a comment" in str(error.value)
    quoted = str(error.value).partition("for YAML: ")[2].removesuffix(".")
    (override,) = shlex.split(quoted)
    assert load_experiment(write("s.yaml", BASE), [override]).data.system_prompt == value


@pytest.mark.parametrize("text", ["12345", "1e5", "no", "on", "010", "0x10", "1_000", "2024-01-02", "true", "null"])
def test_a_field_that_is_a_text_takes_the_text_as_typed(write, text):
    spec = load_experiment(write("s.yaml", BASE), [f"{key}={text}" for key in ("run.name", "data.keys.answer")])
    assert spec.run.name == text
    assert spec.data.keys.answer == (None if text == "null" else text)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.system_prompt=Answer: yes", "Answer: yes"),
        ("data.system_prompt=~", None),
        ("data.system_prompt='12'", "12"),
        ("data.train=2024", "2024"),
        ("data.eval={path: p.jsonl}", "p.jsonl"),
        *(
            ("data.system_prompt=" + text, yaml.safe_load(text))
            for text in ("a#b", "'a # b'", "|\n  a # b", "\n  a\n  b")
        ),
        ("run.steps=0x10", 16),
        ("run.steps=1_0", 10),
        ("trainer.lr=.5", 0.5),
    ],
)
def test_values_typed_on_the_command_line_by_the_type_of_their_field(write, override, value):
    spec = load_experiment(write("s.yaml", BASE), [override])
    name = override.partition("=")[0]
    found = spec.data.train[0] if name == "data.train" else functools.reduce(getattr, name.split("."), spec)
    assert getattr(found, "path", found) == (value if not hasattr(found, "path") else str(Path.cwd() / value))


@pytest.mark.parametrize(("number", "read"), [("-010", -8), ("0_10", 8), ("12:30:45", 45045), ("1:30.5", 90.5)])
@pytest.mark.parametrize("key", ["run.steps", "trainer.lr", "data.chat_template.x"])
def test_numbers_that_yaml_reads_otherwise_than_anybody_are_refused(write, number, read, key):
    text = re.escape(number)
    *above, last = key.split(".")
    base, child = write("s.yaml", BASE), write("child.yaml", "defaults: own.yaml\n")
    write("own.yaml", f"{''.join(f'{name}: {{' for name in above)}{last}: [{number}]{'}' * len(above)}\n")
    for path, overrides in ((base, [f"{key}={number}"]), (base, [f"{key}=[1, {number}]"]), (child, [])):
        with pytest.raises(UserError, match=f"{text} in line .*which YAML reads as {read}: write {read}, or '{text}'"):
            load_experiment(path, overrides)


def test_paths_are_relative_to_the_file_that_names_them(write, tmp_path):
    write("base/base.yaml", BASE)
    path = write("sub/s.yaml", "defaults: ../base/base.yaml\ndata: {train: own.jsonl}\nrun: {dir: results}\n")
    spec = load_experiment(path, ["data.eval=there.jsonl"])
    assert Path(spec.model.path).resolve() == tmp_path / "base" / "m", "of the inherited file"
    assert spec.data.train[0].path == str(tmp_path / "sub" / "own.jsonl")
    assert spec.run.dir == str(tmp_path / "sub" / "results")
    assert spec.data.eval.path == str(tmp_path / "there.jsonl"), "an override is typed in the current directory"
    assert load_experiment(path, ["run.dir=here"]).run.dir == str(tmp_path / "here")
    assert load_experiment(path, ["model.path=/else/where"]).model.path == "/else/where"
    assert load_experiment(write("s.yaml", BASE)).run.dir == str(tmp_path / "runs"), "left out"


def test_a_path_may_begin_with_the_home_directory(write, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    write("home/base.yaml", BASE + "    environment: {function: '~/e.py:play'}\n")
    path = write(
        "home/s.yaml",
        """
        defaults: ~/base.yaml
        run: {dir: ~/runs}
        data: {train: [~/a.jsonl, {path: ~/b.jsonl}], eval: ~/c.jsonl}
        eval: {sets: [{name: d, path: ~/d.jsonl}]}
        adapter: {start: ~/adapter}
        algorithm: {name: opd}
        teacher: {path: ../teacher}
        rewards: [{function: "~/r.py:right"}, {function: model, kwargs: {url: u, tokenizer: rm}}]
        """,
    )
    spec = load_experiment("~/s.yaml", ["model.path=~/m", "data.eval=~/e.jsonl"])
    assert (spec.run.dir, spec.model.path, spec.adapter.start) == (f"{home}/runs", f"{home}/m", f"{home}/adapter")
    assert [each.path for each in spec.data.train] == [f"{home}/a.jsonl", f"{home}/b.jsonl"]
    assert (spec.data.eval.path, spec.eval.sets[0].path) == (f"{home}/e.jsonl", f"{home}/d.jsonl")
    assert spec.teacher.path == f"{tmp_path}/teacher"
    assert [each.kwargs.get("tokenizer", each.function) for each in spec.rewards.functions] == [
        f"{home}/r.py:right",
        f"{home}/rm",
    ]
    assert spec.environment.function == f"{home}/e.py:play"
    harness = "environment={function: harness, harness: {command: [~/agent, -v], directory: '~'}}"
    assert load_experiment(path, [harness]).environment.harness.command == (f"{home}/agent", "-v")
    assert load_experiment(path, ["model.path=~no-such-user/m"]).model.path == f"{tmp_path}/~no-such-user/m"


def test_data_may_be_a_path_a_source_or_several(write, tmp_path):
    spec = load_experiment(write("s.yaml", BASE), ["data.train={path: a, split: x}"])
    assert [(s.path, s.split, s.weight) for s in spec.data.train] == [(str(tmp_path / "a"), "x", 1.0)]
    assert [source.key for source in spec.data.training] == ["data.train"]
    path = write(
        "sub/s.yaml",
        """
        defaults: ../s.yaml
        data:
          train: [one.jsonl, {path: two, weight: 3, keys: {answer: gold}, system_prompt: "", chat_template: {b: 2}}]
          keys: {question: prompt}
          system_prompt: Think.
          chat_template: {a: 1, b: 1}
        eval:
          sets: [{name: hard, path: three, rewards: [{function: "own.py:f"}]}, {name: soft, path: /four}]
        """,
    )
    spec = load_experiment(path, ["data.eval={path: held}"])
    one, two = spec.data.training
    assert (one.path, one.key, one.question) == (str(tmp_path / "sub/one.jsonl"), "data.train.0", "prompt")
    assert (one.system_prompt, one.chat_template) == ("Think.", {"a": 1, "b": 1})
    assert (two.path, two.question, two.answer, two.system_prompt) == (str(tmp_path / "sub/two"), "prompt", "gold", "")
    assert two.chat_template == {"a": 1, "b": 2} and spec.data.train[1].weight == 3.0
    assert [each.path for each in spec.eval.sets] == [str(tmp_path / "sub/three"), "/four"]
    assert spec.eval.sets[0].rewards.functions[0].function == f"{tmp_path / 'sub/own.py'}:f"
    assert spec.data.eval.path == str(tmp_path / "held")
    assert parse_experiment(yaml.safe_load(spec.to_yaml())) == spec
    assert load_experiment(path, ["data.train=five"]).data.train[0].path == str(tmp_path / "five")


def test_resolved_spec_round_trips(write):
    spec = load_experiment(
        write("s.yaml", BASE),
        [
            *("numerics.weight.scale=fp32", "trainer.adam_eps=1e-8", "algorithm={name: sft}", "gates=[]"),
            *("numerics.last_layers_bf16=2", "numerics.scope=[experts.gate_proj,experts.up_proj]"),
            *("numerics.rollout=bf16", "run.name=1e-4"),
        ],
    )
    again = read_resolved(write("resolved.yaml", spec.to_yaml()))
    assert again == spec == load_experiment(spec) and parse_experiment(yaml.safe_load(spec.to_yaml())) == spec
    assert again.trainer.adam_eps == 1e-8 and again.numerics.overrides()["weight"] == {"scale": "fp32"}
    assert "warmup_steps" in spec.to_yaml(), "defaults are written out"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data": {"train": ["/t", {"path": "/u", "weight": 0.0}]}}, "data.train.1.weight: found 0.0"),
    ({"data": {"train": {"path": ""}}}, "data.train.0.path: found '', expected at least 1 character. Correct it"),
    ({"data": {"train": "/t", "keys": {"anser": "gold"}}}, "Did you mean data.keys.answer?"),
    ({"eval": {"sets": [{"name": "a", "path": "/t", "samples": 4}]}}, "a temperature above 0"),
    ({"eval": {"sets": [{"name": "a", "path": "/t", "samples": 4, "temperature": 1.0, "pass_at": [8]}]}}, "8 in pass"),
    ({"eval": {"sets": [{"name": "a", "path": "/t", "min_p": 0.1}]}}, "found min_p=0.1 with temperature=0"),
    ({"eval": {"sets": [{"name": "a", "path": "/t"}, {"name": "a", "path": "/u"}]}}, "two sets called a"),
    ({"run": {"dir": "${oc.env:HOME}/x"}}, "run.dir: found '${oc.env:HOME}/x', expected the value itself"),
    ({"trainr": {}}, "trainr: found an unknown key with value {}, expected one of run, "),
    ({"trainer": {"learning_rate": 1}}, "Did you mean trainer.lr? "),
    ({"rollout": {"warmup_step": 1}}, "Did you mean trainer.warmup_steps? "),
    (gate("train/loss", abov=1.0), "Did you mean gates.above? "),
    ({"algorithm": {"name": "sft", "clip_low": 0.2}}, "of sft: name, batch_size. That key belongs to cispo, dapo,"),
    ({"run": {"steps": 0}}, "run.steps: found 0, expected a number greater than or equal to 1"),
    ({"run": {"name": "../x"}}, "text that matches"),
    ({"trainer": {"lr": float("nan")}}, "finite number"),
    ({"trainer": {"lr": 1e-5, "min_lr": 1e-4}}, "trainer: found min_lr=0.0001, expected at most lr=1e-05"),
    ({"rollout": {"top_k": 1}}, "2 or more, or -1 for all"),
    ({"numerics": {"preset": "bf16"}}, "numerics.trainer=bf16"),
    ({"numerics": {"preset": "mxfp8", "mode": "native"}}, "set numerics.rollout to bf16"),
    ({"numerics": {"weight": {"format": "bf16"}}}, "quantize both or neither"),
    ({"numerics": {"activation": {"granularity": "tensor"}}}, "token_group or channel"),
    ({"numerics": {"scope": ["q_proj", "k_proj", "v_proj"]}}, "the engine quantizes"),
    ({"numerics": {"scope": ["q_proj"], "rollout": "bf16"}}, "name all of them or none"),
    ({"numerics": {"scope": [], "rollout": "bf16"}}, "quantizes nothing"),
    ({"numerics": {"kv": "fp8", "mode": "native"}}, "numerics.kv: found 'fp8 with numerics.mode=native'"),
    ({"algorithm": {"name": "none"}}, " or ".join(map(repr, sorted(ALGORITHMS)))),
    ({"algorithm": {"name": "gsop"}}, "Did you mean gspo? Set it in"),
    (grpo(kl={"loss": {"estimator": "k1"}}), "estimator: found k1, expected k2"),
    (grpo(loss_length=8), "expected seq_mean_token_sum_norm, the only mode that divides"),
    (grpo(veto=1e-4, ratio="bypass"), "found veto=0.0001 with ratio=bypass, expected none"),
    (grpo(rejection={"name": "icepop", "low": 1.5}), "found low=1.5 and high=5.0, expected low < 1 <"),
    (grpo(rejection={"name": "mis", "low": 0.5}), "algorithm.rejection: found low=0.5 with mis, expected none"),
    (grpo(rejection={"name": "icepop"}, tis_level="sequence"), "found tis_level=sequence with rejection icepop"),
    (grpo(centering=8, updates_per_batch=2), "=8 with updates_per_batch=2 and epochs=1, expected one update"),
    (grpo(centering=8, ratio="bypass"), "with ratio=bypass"),
    (grpo(centering=8, tis_level="sequence"), "weights of whole sequences"),
    (grpo(centering=8, rejection={"name": "mis"}), "weights of whole sequences"),
    ({"algorithm": {"name": "maxrl", "overlong": {}}}, "found overlong.penalty=1 with maxrl, expected 0"),
    ({"algorithm": {"name": "opd", "dynamic_sampling": True}}, "=true with reward_weight=0, expected false"),
    ({"algorithm": {"name": "ppo", "critic": {"lr": 1e-6, "min_lr": 1e-5}}}, "min_lr=1e-05, expected at most lr=1e-06"),
    ({"algorithm": {"name": "rloo", "kl": {"reward": {"coefficient": 0.1}}}}, "kl.reward.coefficient=0.1 with rloo"),
    ({"rollout": {"speculation": {"drafts": 2}}}, "No engine drafts tokens any more"),
    ({"rollout": {"in_flight": True}}, "found in_flight=true with staleness=0, expected false"),
    ({"rollout": {"staleness": 2, "in_flight": False}}, "found in_flight=false with staleness=2, expected true"),
    ({"rollout": {"oversample": 1.5}}, "found oversample=1.5 with staleness=0 and in_flight=false"),
    ({"rollout": {"oversample": 1.5, "staleness": 1}}, "rollout.in_flight=true"),
    ({"gates": {}}, "a list"),
    (gate("mismatch/k3_kl", below=0.0), "exactly one of above and below"),
    (gate("mismatch/tis_clipfraq"), "Did you mean mismatch/tis_clipfrac?"),
    (gate("train/loss", action="restart"), "gates.0.action: found 'restart', expected"),
    (gate("train/loss", recover=1.1), "expected recover <= above"),
    (gate("train/loss", tis_cap=1.5), "Remove tis_cap"),
    (gate("train/update_survival"), "train/update_survival with adapter.mode=None"),
    (gate("rollout/turns_mean"), "rollout/turns_mean with environment=single_turn', expected an environment"),
    (gate("eval/hard/pass@2") | {"eval": {"problems": 0}}, "eval.problems=0', expected eval.problems above 0"),
    (gate("rollout/reward_failures", action="skip_step"), "after a step's decision"),
]


@pytest.mark.parametrize(("values", "expected"), REFUSED)
def test_a_spec_that_cannot_be_meant_is_refused_in_one_line(values, expected):
    text = message(values)
    assert text.startswith(next(iter(values))) and expected in text and "\n" not in text
    assert text.endswith((".", "?")) and not text.endswith("..")
