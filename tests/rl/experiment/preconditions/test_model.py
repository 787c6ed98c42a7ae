"""Models and layouts that cannot be trained are refused before anything starts."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8rl.rl.experiment import parse_experiment
from fp8rl.rl.experiment.preconditions import check
from tests.support.preconditions import edit_config, merged, refusal
from tests.support.tiny_model import TinyModel, write_tiny_model


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"trainer": {"decay_steps": 3, "min_lr": 1e-5}}, ["trainer.min_lr=1e-05", "trainer.decay_steps=3"]),
        ({"trainer": {"decay_steps": 3, "decay": "linear"}}, []),
        ({"algorithm": {"name": "ppo", "critic": {"min_lr": 1e-6}}}, ["algorithm.critic.min_lr=1e-06"]),
    ],
)
def test_keys_of_a_rate_that_does_not_decay_are_said(values, sections, expected):
    said = []
    check(parse_experiment(merged(values, **sections)), said.append)
    assert [text.partition(" changes nothing")[0] for text in said if "changes nothing" in text] == expected


def test_broken_model_files_are_refused(values, model, tmp_path):
    for index, said in (
        ({"weight_map": {"a": "model-00001.safetensors"}}, "model-00001.safetensors"),
        ([], "model.safetensors.index.json"),
        ({"weight_map": 1}, "model.safetensors.index.json"),
    ):
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        assert said in refusal(values)
    (model / "model.safetensors.index.json").unlink()
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "whole safetensors file" in refusal(values)
    (model / "config.json").write_text("{")
    assert "valid JSON" in refusal(values)
    (model / "config.json").unlink()
    assert "without config.json" in refusal(values)
    text = refusal(values, model={"path": str(tmp_path / "absent")})
    assert text.startswith("model.path: found") and "absent" in text and "the folder of its spec file" in text
    assert text.endswith("`fp8rl init DIR` writes a small model, DIR/model.")


def test_a_spec_that_transformer_engine_does_not_compute_is_refused_where_it_would(values, monkeypatch):
    native = {"mode": "native", "activation": {"granularity": "tensor"}}
    check(parse_experiment(merged(values, numerics=native)))
    monkeypatch.setattr("fp8rl.rl.experiment.preconditions.rules.has_transformer_engine", lambda: True)
    assert refusal(values, numerics=native).startswith("numerics.activation.granularity: found 'tensor'")
    check(parse_experiment(merged(values, numerics={"mode": "native"})))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["PhiForCausalLM"]),
        ("hidden_size", None),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [64, 64]}),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rms_norm_eps", 0.0),
    ],
)
def test_what_the_trainer_would_refuse_is_refused_before(values, model, key, value):
    edit_config(model, **{key: value})
    text = refusal(values)
    assert text.startswith("model.path") and key in text and "found " in text


def test_rows_of_which_an_indexer_would_choose_keys_are_refused(values, tmp_path):
    path = tmp_path / "indexed"
    write_tiny_model(path, TinyModel(hidden=256, heads=2, family="glm_moe_dsa"))
    check(parse_experiment(merged(values, model={"path": str(path)})))
    edit_config(path, index_topk=1023)
    assert refusal(values, model={"path": str(path)}) == (
        "rollout.context_length: found 1024, expected at most 1023, the model's index_topk (in a longer row the "
        "indexer leaves keys out, which is not supported). Set rollout.context_length=1023 or less."
    )


def test_quantized_weights_are_refused_even_if_the_config_hides_them(values, model):
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, model / "model.safetensors")
    text = refusal(values)
    assert name in text and "F8_E4M3" in text and "BF16 checkpoint" in text
    save_file({name: tensor.float() for name, tensor in weights.items()}, model / "model.safetensors")
    check(parse_experiment(values))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(values, model, value):
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    weights[name][3, 5] = value
    save_file(weights, model / "model.safetensors")
    text = refusal(values)
    assert text.startswith(f"model.path: {name}: found '1 of ") and "NaN or infinite" in text


@pytest.fixture
def teacher(models, tmp_path):
    """A private copy of the dense model, which knows the same tokens."""
    return shutil.copytree(models / "dense", tmp_path / "teacher")


@pytest.fixture
def taught(values, teacher):
    return merged(values, algorithm={"name": "opd"}, teacher={"path": str(teacher)})


def test_another_vocabulary_is_refused(taught, teacher, model):
    check(parse_experiment(taught))
    path = teacher / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    token = next(token for token, id in vocabulary.items() if id == 100)
    vocabulary["other"] = vocabulary.pop(token)
    path.write_text(json.dumps(tokenizer))
    text = refusal(taught)
    assert text.startswith(f'teacher.path: found "{teacher} with a tokenizer that ')
    assert f"the tokenizer of model.path = {model}, which " in text and "the same family" in text
    edit_config(teacher, vocab_size=256)
    expected = f"teacher.path: found '{teacher} with vocab_size = 256', expected 128, as in model.path = {model}."
    assert refusal(taught).startswith(expected)


def test_a_teacher_without_room_for_the_longest_answer_is_refused(taught, teacher):
    text = refusal(taught, teacher={"context_length": 1029})
    assert text.startswith("teacher.context_length: found 1029, expected at least 1030: rollout.context_length = 1024")
    for tokens in (1029, 2**40):  # too few for an answer; too many for the memory
        said = f"teacher.max_total_tokens: found {tokens}"
        assert refusal(taught, teacher={"max_total_tokens": tokens}).startswith(said)
    edit_config(teacher, max_position_embeddings=1029)
    text = refusal(taught)
    assert text.startswith("teacher.context_length: found 1030, expected at most 1029, the max_position_embeddings of")
    assert "Lower rollout.context_length to at most 1023" in text


def test_what_is_wrong_with_its_directory_is_said_of_it(taught, teacher):
    assert refusal(taught, teacher={"path": "/nowhere"}).startswith("teacher.path: found '/nowhere'")
    assert refusal(taught, teacher={"tp": 3}).startswith("teacher.tp: found 3")
    assert "/ max(trainer.tp, rollout.tp) = 384 / 2: found 192" in refusal(taught, trainer={"tp": 2})
    weights = load_file(teacher / "model.safetensors")
    name = next(iter(weights))
    save_file({key: value for key, value in weights.items() if key != name}, teacher / "model.safetensors")
    assert refusal(taught).startswith("teacher.path") and name in refusal(taught)
