"""What a reward needs beside its function is looked for before anything starts."""

import pytest

from fp8rl.rl.experiment import load_experiment, parse_experiment
from fp8rl.rl.experiment.preconditions import check
from tests.support.preconditions import merged, refusal


def entry(**kwargs):
    return [{"function": "integer"}, {"function": "model", "kwargs": {"url": "http://127.0.0.1:1", **kwargs}}]


def test_a_reward_models_tokenizer_is_read_at_the_start(values, model, tmp_path):
    found = {**values, "rewards": entry(tokenizer=str(tmp_path))}
    assert refusal(found).startswith(f"rewards.functions.1.kwargs.tokenizer: found '{tmp_path} without tokenizer.json'")
    check(parse_experiment(merged(values) | {"rewards": entry(tokenizer=str(model))}))


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [({}, "kwargs give no tokenizer"), ({"tokenizer": "x", "urls": 1}, "rewards.functions.1.kwargs: found 'urls'")],
)
def test_its_arguments_are_checked(values, kwargs, said):
    assert said in refusal({**values, "rewards": entry(**kwargs)})


def test_its_directory_is_relative_to_the_file_that_names_it(tmp_path):
    (tmp_path / "spec.yaml").write_text(
        "model: {path: m}\ndata: {train: d}\nrewards: [{function: model, kwargs: {url: u, tokenizer: rm}}]\n"
    )
    (config,) = load_experiment(tmp_path / "spec.yaml").rewards.functions
    assert config.kwargs == {"url": "u", "tokenizer": str(tmp_path / "rm")}
