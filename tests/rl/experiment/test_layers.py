"""What of a section stays where a later layer names another member of it, and what is said of the rest."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment, load_experiment
from tests.support.paths import EXAMPLES

VALUES = {"model": {"path": "/m"}, "data": {"train": "/t"}}
GRPO = {"name": "grpo", "clip_high": 0.4, "updates_per_batch": 4, "kl": {"loss": {"coefficient": 0.01}}}
ICEPOP = {"name": "icepop", "low": 0.4, "high": 5.0}
GUESS = {"function": "guess", "timeout_s": 9.0, "kwargs": {"tries": 5}}
HARNESS = {"function": "harness", "harness": {"command": ["sh"], "max_requests": 3}, "timeout_s": 9.0}


def loaded(folder: Path, sections: dict[str, Any], *overrides: str) -> tuple[Experiment, list[str]]:
    said: list[str] = []
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(VALUES | sections, sort_keys=False))
    return load_experiment(path, overrides, said.append), said


def test_another_algorithm_keeps_what_it_has_too(tmp_path: Path) -> None:
    spec, said = loaded(tmp_path, {"algorithm": GRPO}, "algorithm.name=rloo")
    assert spec.algorithm.model_dump(include=set(GRPO)) == {
        **GRPO,
        "name": "rloo",
        "kl": {"loss": {"coefficient": 0.01, "estimator": "k2"}, "reward": {"coefficient": 0.0}},
    }
    assert said == []


def test_each_key_that_another_algorithm_lacks_is_said(tmp_path: Path) -> None:
    _, said = loaded(tmp_path, {"algorithm": GRPO}, "algorithm.name=sft")
    assert said == [
        "algorithm.clip_high=0.4 is left out: sft has no such key",
        "algorithm.updates_per_batch=4 is left out: sft has no such key",
        "algorithm.kl.loss.coefficient=0.01 is left out: sft has no such key",
    ]
    with pytest.raises(UserError, match=r"algorithm\.clip_low: found an unknown key .* of sft"):
        loaded(tmp_path, {"algorithm": GRPO}, "algorithm.name=sft", "algorithm.clip_low=0.1")


def test_settings_hold_in_whatever_order_they_and_the_name_are_given(tmp_path: Path) -> None:
    for overrides in (["algorithm.gamma=0.9", "algorithm.name=ppo"], ["algorithm.name=ppo", "algorithm.gamma=0.9"]):
        spec, _ = loaded(tmp_path, {"algorithm": GRPO}, *overrides)
        assert spec.algorithm.model_dump()["gamma"] == 0.9 and spec.algorithm.model_dump()["clip_high"] == 0.4


def test_a_default_of_the_one_algorithm_becomes_that_of_the_other(tmp_path: Path) -> None:
    """A resolved spec writes all defaults out: it would hardly be GSPO with the clip of GRPO."""
    spec, _ = loaded(tmp_path, {"algorithm": {"name": "grpo"}})
    path = tmp_path / "resolved.yaml"
    path.write_text(spec.to_yaml())
    said: list[str] = []
    other = load_experiment(path, ["algorithm.name=gspo"], said.append)
    assert other.algorithm == loaded(tmp_path, {"algorithm": {"name": "gspo"}})[0].algorithm
    assert "algorithm.clip_high: 0.28, the default of grpo, becomes 0.0004, that of gspo" in said
    _, said = loaded(tmp_path, {"algorithm": GRPO}, "algorithm.name=gspo")
    assert said == ["algorithm.clip_high=0.4 stays; the default of gspo is 0.0004"]


def test_an_inherited_section_is_kept_likewise(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"algorithm": GRPO}))
    spec, _ = loaded(tmp_path, {"defaults": "base.yaml", "algorithm": {"name": "cispo"}})
    assert spec.algorithm.model_dump()["updates_per_batch"] == 4
    assert loaded(tmp_path, {"defaults": "base.yaml", "algorithm": {"name": "sft"}})[1][0].endswith("no such key")


@pytest.mark.slow
def test_a_class_of_a_users_own_keeps_what_it_has_too(tmp_path: Path) -> None:
    spec, said = loaded(tmp_path, {"algorithm": GRPO}, f"algorithm.name={EXAMPLES}/median.py:Median")
    assert spec.algorithm.model_dump()["clip_high"] == 0.4 and said == []
    median = {"name": f"{EXAMPLES}/median.py:Median", "quantile": 0.3, "clip_low": 0.1}
    spec, said = loaded(tmp_path, {"algorithm": median}, "algorithm.name=rloo")
    assert said == ["algorithm.quantile=0.3 is left out: rloo has no such key"]


def test_the_settings_of_a_users_class_go_although_its_file_is_gone(tmp_path: Path) -> None:
    _, said = loaded(tmp_path, {"algorithm": {"name": "gone.py:Class", "own": 1}}, "algorithm.name=sft")
    assert said == ["algorithm.own=1 is left out: sft has no such key"]


@pytest.mark.parametrize("name", ["grp", "absent.py:Class", "3"])
def test_a_name_of_nothing_is_refused_by_its_own_message(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="algorithm.name: found"):
        loaded(tmp_path, {"algorithm": GRPO}, f"algorithm.name={name}")


def test_another_rejection_keeps_what_it_has_too(tmp_path: Path) -> None:
    spec, said = loaded(tmp_path, {"algorithm": GRPO | {"rejection": ICEPOP}}, "algorithm.rejection.name=mis")
    assert spec.algorithm.model_dump()["rejection"] == {"name": "mis", "low": None, "high": 2.0}
    assert said == [
        "algorithm.rejection.low=0.4 is left out: mis has no such key",
        "algorithm.rejection.high: 5.0, the default of icepop, becomes 2.0, that of mis",
    ]


@pytest.mark.parametrize("override", ["environment=calculator", "environment.function=calculator"])
def test_another_environment_keeps_what_it_has_too(tmp_path: Path, override: str) -> None:
    spec, said = loaded(tmp_path, {"environment": GUESS}, override)
    assert (spec.environment.function, spec.environment.timeout_s, spec.environment.kwargs) == ("calculator", 9.0, {})
    assert said == ["environment.kwargs.tries=5 is left out: calculator has no such key"]


def test_the_program_of_a_harness_goes_with_it(tmp_path: Path) -> None:
    spec, said = loaded(tmp_path, {"environment": HARNESS}, "environment=guess")
    assert spec.environment.harness is None and spec.environment.timeout_s == 9.0 and len(said) == 2
    spec, said = loaded(tmp_path, {"environment": HARNESS}, "environment.function=verifiers")
    assert spec.environment.harness is not None and spec.environment.harness.max_requests == 3
    assert said == ["environment.harness.command=['sh'] is left out: verifiers has no such key"]


def test_keyword_arguments_stay_that_a_users_environment_takes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("async def play(conversation, tries): ...\nasync def any(c, **kwargs): ...")
    numbered, said = GUESS | {"kwargs": {1: 2}}, ["environment.kwargs.1=2 is left out: calculator has no such key"]
    assert loaded(tmp_path, {"environment": numbered}, "environment=calculator")[1] == said
    for function in ("play", "any"):
        spec, said = loaded(tmp_path, {"environment": GUESS}, f"environment={tmp_path}/own.py:{function}")
        assert spec.environment.kwargs == {"tries": 5} and said == []


def test_a_key_beside_a_value_that_stands_for_a_section_leaves_that_value(tmp_path: Path) -> None:
    """`rewards: [...]` and then `rewards.workers=4` was a run by the default reward."""
    spec, _ = loaded(tmp_path, {"rewards": [{"function": "math"}]}, "rewards.workers=4")
    assert [each.function for each in spec.rewards.functions] == ["math"] and spec.rewards.workers == 4
    spec, _ = loaded(
        tmp_path, {"rewards": {"functions": [{"function": "math"}], "workers": 4}}, "rewards=[{function: format}]"
    )
    assert [each.function for each in spec.rewards.functions] == ["format"] and spec.rewards.workers == 4
    spec, _ = loaded(tmp_path, {"environment": "guess"}, "environment.timeout_s=9.0")
    assert (spec.environment.function, spec.environment.timeout_s) == ("guess", 9.0)
    spec, _ = loaded(tmp_path, {}, "data.train.weight=2.0")
    assert (spec.data.train[0].path, spec.data.train[0].weight) == ("/t", 2.0)


def test_a_path_alone_is_another_source_and_what_goes_with_the_first_is_said(tmp_path: Path) -> None:
    data = {"train": "/t", "eval": {"path": "/d", "split": "test", "keys": {"question": "q"}}}
    spec, said = loaded(tmp_path, {"data": data}, "data.eval=/other")
    assert spec.data.eval is not None and spec.data.eval.split is None
    assert said == [
        "data.eval.split='test' is left out with its path; data.eval.path=PATH would keep it",
        "data.eval.keys.question='q' is left out with its path; data.eval.path=PATH would keep it",
    ]
    spec, said = loaded(tmp_path, {"data": data}, "data.eval.path=/other")
    assert spec.data.eval is not None and (spec.data.eval.path, spec.data.eval.split) == ("/other", "test")
    assert said == []


def test_one_source_in_place_of_a_list_says_which_keys_go(tmp_path: Path) -> None:
    data = {"train": ["/t", {"path": "/u", "weight": 2.0, "keys": {"question": "q"}}]}
    spec, said = loaded(tmp_path, {"data": data}, "data.train.path=/other")
    assert [(each.path, each.weight) for each in spec.data.train] == [("/other", 1.0)]
    tail = "is left out: data.train names one source now, in place of a list; data.train=[...] names several"
    assert said == [f"data.train.1.weight=2.0 {tail}", f"data.train.1.keys.question='q' {tail}"]
