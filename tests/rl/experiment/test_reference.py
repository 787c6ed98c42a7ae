"""The reference page and the schema for editors are what the sections say, and the schema takes every example."""

import jsonschema
import pytest
import yaml

from docs.hooks.reference import descriptions, reference, schema, schema_text
from fp8rl.rl.algorithms import ALGORITHMS
from fp8rl.rl.experiment.validation import valid_keys
from tests.support.paths import ROOT, SPECS


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema())


@pytest.mark.slow
def test_the_page_and_the_schema_are_those_that_the_sections_make() -> None:
    remedy = "run `make pages`"
    assert (ROOT / "docs/reference.md").read_text() == reference(), remedy
    assert (ROOT / "fp8rl/spec.schema.json").read_text() == schema_text(), remedy


def test_every_key_is_on_the_page_with_what_it_is_for() -> None:
    page = reference()
    for key in valid_keys():
        assert f"{key.rpartition('.')[2]}`" in page or f"## {key}" in page, key
    assert "|  |" not in page, "a key without a description"
    for kind in ALGORITHMS.values():
        assert descriptions(kind).keys() == kind.model_fields.keys()


@pytest.mark.slow
def test_the_schema_takes_every_example(validator: jsonschema.Draft202012Validator) -> None:
    validator.check_schema(validator.schema)
    for spec in SPECS:
        problems = list(validator.iter_errors(yaml.safe_load(spec.read_text())))
        assert not problems, f"{spec.name}: {problems[0].message}"


@pytest.mark.parametrize("wrong", [{"trainr": {}}, {"run": {"steps": "3"}}, {"data": {"train": {"pth": "x"}}}], ids=str)
def test_the_schema_marks_what_a_start_would_refuse(validator: jsonschema.Draft202012Validator, wrong: object) -> None:
    assert not validator.is_valid(wrong)


def test_the_schema_takes_what_may_be_shorter_and_a_users_own(validator: jsonschema.Draft202012Validator) -> None:
    for short in (
        {"environment": "guess"},
        {"rewards": [{"function": "integer"}]},
        {"data": {"train": "a", "eval": "b"}},
        {"data": {"train": ["a", {"path": "b", "weight": 2.0}]}},
        {"algorithm": {"name": "own.py:Own", "anything": 1}},
        {"defaults": ["a.yaml"]},
    ):
        assert validator.is_valid(short), short
