"""Weights that are not those of the config.json beside them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fp8rl.models import Model, read_model
from fp8rl.models.checkpoint.reading import check_stored, stored_tensors
from fp8rl.models.checkpoint.writing import write_tensors
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from tests.support.tiny_model import TinyModel, write_tiny_model

EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "moe", TinyModel(heads=4, kv_heads=2))
    return tmp_path / "moe"


def refusal(path: Path, model: Model) -> str:
    with pytest.raises(UserError) as error:
        check_stored(path, model)
    return str(error.value)


@pytest.mark.parametrize(
    "shape",
    [
        TinyModel(heads=4, kv_heads=2),
        TinyModel(heads=4, kv_heads=2, experts=0, intermediate=384, tied=True),
        TinyModel(heads=2, kv_heads=1, experts=0, intermediate=128),
    ],
)
def test_what_transformers_writes_for_a_config_is_what_is_expected(tmp_path: Path, shape: TinyModel) -> None:
    write_tiny_model(tmp_path / "model", shape)
    check_stored(tmp_path / "model", read_model(tmp_path / "model"))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"layers": 3}, ["model.layers.2.input_layernorm.weight", "no such tensor", "[128]"]),
        ({"experts": 9}, ["model.layers.0.mlp.gate.weight", "[8, 128]", "[9, 128]"]),
        ({"expert_size": 256}, ["model.layers.0.mlp.experts.0.gate_proj.weight", "[128, 128]", "[256, 128]"]),
    ],
)
def test_a_config_of_another_model_names_the_first_tensor(model: Path, change: dict, parts: list[str]) -> None:
    read = read_model(model)
    message = refusal(model, Model(read.architecture, dataclasses.replace(read.sizes, **change)))
    for part in ("model.path: ", "config.json", "another architecture", *parts):
        assert part in message


def test_a_tensor_that_is_missing_or_in_excess_is_named(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(64)}, file)
    check_stored(model, read_model(model))  # a leftover that nothing reads
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(512)}, file)
    assert "model.layers.0.self_attn.q_proj.bias: found 'a tensor of shape [512]'" in refusal(model, read_model(model))
    del tensors[EXPERT]
    save_file(tensors, file)
    assert f"{EXPERT}: found 'no such tensor', expected one of shape [128, 128]" in refusal(model, read_model(model))


def test_an_output_of_its_own_beside_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_model(model, TinyModel(heads=4, kv_heads=2, experts=0, intermediate=384, tied=True))
    tensors = load_file(model / "model.safetensors")
    output = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": output}, model / "model.safetensors")
    check_stored(model, read_model(model))
    output[3, 5] += 1
    save_file(tensors | {"lm_head.weight": output}, model / "model.safetensors")
    message = refusal(model, read_model(model))
    assert message.startswith("model.path: lm_head.weight: found 'weights other than model.embed_tokens.weight'")
    assert "Set tie_word_embeddings to false in config.json" in message
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    check_stored(model, read_model(model))


def test_draft_layers_that_the_config_does_not_count_are_told_from_another_model(model: Path) -> None:
    file = model / "model.safetensors"
    save_file(load_file(file) | {"model.layers.2.eh_proj.weight": torch.zeros(128, 256)}, file)
    message = refusal(model, read_model(model))
    assert "model.layers.2.eh_proj.weight: found 'a tensor of shape [128, 256] after the 2 layers" in message
    assert "set num_nextn_predict_layers in config.json" in message


def sharded(model: Path) -> dict[str, str]:
    """Write the weights as two files with an index; returns the index."""
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, model / file)
    (model / "model.safetensors").unlink()
    listed = {name: file for file, held in halves.items() for name in held}
    write_index(model, listed)
    check_stored(model, read_model(model))
    return listed


def write_index(model: Path, listed: dict[str, str]) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


@pytest.mark.parametrize("index", [True, False], ids=["index", "no-index"])
def test_a_tensor_in_two_files_is_refused(model: Path, index: bool) -> None:
    name = min(load_file(model / "model.safetensors"))
    if index:
        sharded(model)
    save_file({name: torch.zeros(2)}, model / "z.safetensors")
    first = "a.safetensors" if index else "model.safetensors"
    assert f"{name} in {first} and in z.safetensors of " in refusal(model, read_model(model))


def test_an_index_that_is_not_that_of_the_files_is_refused(model: Path) -> None:
    listed = sharded(model)
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, model / "consolidated.safetensors")
    check_stored(model, read_model(model))  # as Mistral publishes its own form beside it
    name = next(each for each, file in listed.items() if file == "b.safetensors")
    for wrong, said in [
        (listed | {name: "c.safetensors"}, "found 'c.safetensors, which is not in "),
        (listed | {name: "a.safetensors"}, f"found '{name} in a.safetensors', expected a tensor that the file has"),
        ({each: listed[each] for each in listed if each != name}, f"found 'no {name}', expected all tensors of b"),
        (listed | {name: "../b.safetensors"}, "is no name of a file beside the index"),
    ]:
        write_index(model, wrong)
        assert said in refusal(model, read_model(model))


MATRIX = "model.layers.0.self_attn.q_proj.weight"


def in_fp8(model: Path, scale: str) -> dict[str, torch.Tensor]:
    """Have a matrix of the directory in FP8, with its scales in another file; the tensors of the directory before."""
    file, spec = model / "model.safetensors", QuantSpec.preset(f"fp8_block_{scale}").weight
    tensors = load_file(file)
    coded = quantize(tensors[MATRIX], spec)
    save_file(tensors | {MATRIX: coded.data}, file)
    save_file({MATRIX + "_scale_inv": coded.scale_inv}, model / "scales.safetensors")
    return tensors | {MATRIX: coded.dequantize(torch.bfloat16)}


@pytest.mark.parametrize(
    ("scale", "says"),
    [("pow2", "no value changes"), ("fp32", "values of 1 are rounded, as their scales are no powers of two")],
)
def test_weights_in_fp8_are_read_as_codes_times_scales(model: Path, scale: str, says: str) -> None:
    expected, said = in_fp8(model, scale), []
    check_stored(model, read_model(model), say=said.append)
    assert said[0].startswith("1 weights of the model are in FP8") and said[0].endswith(says)
    assert re.fullmatch(r"the model has matrices \d+ in BF16 that specs .*; both sides quantize .*", said[1])
    read = dict(stored_tensors(model, read_model(model)))
    assert read.keys() == expected.keys() and all(torch.equal(read[name], value) for name, value in expected.items())


def test_files_have_the_same_bytes_whatever_the_order_of_a_hash_map(tmp_path: Path) -> None:
    """safetensors' own files of the same metadata differ, in one process too."""
    tensors = {"b": torch.arange(6).view(2, 3), "a": torch.ones(1, dtype=torch.bfloat16)}
    several = {"format": "pt", "base_digest": 'a \u00e9 "quoted" \\ \n', "another": "", "b": "7"}
    for metadata in (several, {}, {"format": "pt"}):
        for number in range(12):
            write_tensors(tmp_path / str(number), tensors, metadata)
        assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1
        with safe_open(tmp_path / "0", framework="pt") as file:
            assert (file.metadata() or {}) == metadata
            assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
