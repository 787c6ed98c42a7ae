"""A teacher that cannot be asked about the policy's tokens is refused before anything starts."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from fp8rl.rl.experiment import parse_experiment
from fp8rl.rl.experiment.preconditions import check
from tests.support.preconditions import edit_config, merged, refusal


@pytest.fixture
def teacher(models, tmp_path):
    """A private copy of the dense model, which knows the same tokens."""
    return shutil.copytree(models / "dense", tmp_path / "teacher")


@pytest.fixture
def taught(values, teacher):
    return merged(values, algorithm={"name": "opd"}, teacher={"path": str(teacher)})


def test_a_teacher_of_another_architecture_and_the_same_tokens_will_do(taught):
    check(parse_experiment(taught))


def test_another_vocabulary_is_refused(taught, teacher, model):
    path = teacher / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    token = next(token for token, id in vocabulary.items() if id == 100)
    vocabulary["other"] = vocabulary.pop(token)
    path.write_text(json.dumps(tokenizer))
    text = refusal(taught)
    assert text.startswith(f'teacher.path: found "{teacher} with a tokenizer that ')
    assert f"that of model.path = {model}, which " in text and "the same family" in text
    edit_config(teacher, vocab_size=256)
    expected = f"teacher.path: found '{teacher} with vocab_size = 256', expected 128, that of model.path = {model}."
    assert refusal(taught).startswith(expected)


def test_a_teacher_without_room_for_the_longest_answer_is_refused(taught, teacher):
    text = refusal(taught, teacher={"context_length": 1029})
    assert text.startswith("teacher.context_length: found 1029, expected at least 1030: rollout.context_length = 1024")
    assert refusal(taught, teacher={"max_total_tokens": 1029}).startswith("teacher.max_total_tokens: found 1029")
    edit_config(teacher, max_position_embeddings=1029)
    text = refusal(taught)
    assert text.startswith("teacher.context_length: found 1030, expected at most 1029, the max_position_embeddings of")
    assert "Lower rollout.context_length to at most 1023" in text


def test_what_is_wrong_with_its_directory_is_said_of_it(taught, teacher):
    assert refusal(taught, teacher={"path": "/nowhere"}).startswith("teacher.path: found '/nowhere'")
    assert refusal(taught, teacher={"tp": 3}).startswith("teacher.tp: found 3")
    weights = load_file(teacher / "model.safetensors")
    name = next(iter(weights))
    save_file({key: value for key, value in weights.items() if key != name}, teacher / "model.safetensors")
    assert refusal(taught).startswith("teacher.path") and name in refusal(taught)


def test_its_kv_cache_counts(taught):
    assert refusal(taught, teacher={"max_total_tokens": 2**40}).startswith(
        "teacher.max_total_tokens: found 1099511627776"
    )
