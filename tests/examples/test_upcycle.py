"""A mixture of experts of a dense model begins as that model."""

import dataclasses
from pathlib import Path

import pytest
import torch

from examples.upcycle import upcycle
from fp8rl.models import read_model
from fp8rl.models.checkpoint.padding import padded, unpadded
from fp8rl.models.checkpoint.reading import check_stored
from tests.support.padded import DENSE, NINE_HEADS, SMOL, dense, logits, unscaled, weights, whole_blocks, write
from tests.support.preconditions import edit_config
from tests.support.tiny_model import TinyModel


def test_without_perturbation_a_mixture_is_the_dense_model(tmp_path: Path) -> None:
    source = dense(tmp_path / "dense")
    upcycle(source, tmp_path / "moe", layers=1, noise=0.0)
    model = read_model(tmp_path / "moe")
    sizes = model.sizes
    assert (sizes.dense_layers, sizes.experts, sizes.top_k) == (DENSE.layers - 1, 4, 2)
    assert (sizes.expert_size, sizes.shared_size) == (128, 256)
    check_stored(tmp_path / "moe", model)
    torch.testing.assert_close(logits(tmp_path / "moe"), logits(source), rtol=0, atol=1e-5)


def test_experts_differ_by_a_seeded_share_of_their_weights(tmp_path: Path) -> None:
    source = dense(tmp_path / "dense")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        upcycle(source, tmp_path / name, layers=1, experts=2, noise=0.1, seed=seed)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    own, matrix = f"model.layers.{DENSE.layers - 1}.mlp.experts.{{}}.down_proj.weight", "down_proj.weight"
    whole = weights(source)[f"model.layers.{DENSE.layers - 1}.mlp.{matrix}"][:, 256:]
    assert not torch.equal(a[own.format(0)], a[own.format(1)]) and not torch.equal(a[own.format(0)], c[own.format(0)])
    assert ((a[own.format(0)] - whole).std() / whole.std()).item() == pytest.approx(0.1, rel=0.05)


def test_a_mixture_of_a_padded_model_becomes_one_in_its_widths_before(tmp_path: Path) -> None:
    source = unscaled(write(tmp_path / "source", dataclasses.replace(NINE_HEADS, intermediate=384)))
    padded(source, tmp_path / "padded", "MODEL", whole_blocks)
    upcycle(tmp_path / "padded", tmp_path / "wide", layers=1, noise=0.0)
    torch.testing.assert_close(logits(tmp_path / "wide"), logits(source), rtol=0, atol=1e-5)
    unpadded(tmp_path / "wide", tmp_path / "narrow", "MODEL")
    narrow = read_model(tmp_path / "narrow")
    assert narrow.architecture.name == "Glm4MoeForCausalLM" and narrow.sizes.hidden_size == NINE_HEADS.hidden
    torch.testing.assert_close(logits(tmp_path / "narrow"), logits(source), rtol=0, atol=1e-5)


def test_another_model_and_numbers_that_do_not_fit_it_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"found \['Qwen3ForCausalLM'\] with .*, expected LlamaForCausalLM or Mistral"):
        upcycle(write(tmp_path / "qwen", TinyModel(experts=0)), tmp_path / "out")
    with pytest.raises(SystemExit, match="with unscaled positions"):
        upcycle(write(tmp_path / "scaled", SMOL), tmp_path / "out")
    source = dense(tmp_path / "dense")
    edit_config(source, sliding_window=4096)
    with pytest.raises(SystemExit, match="a window of 4096, expected .* no window"):
        upcycle(source, tmp_path / "out")
    for wrong, message in (
        ({"layers": 1, "top_k": 5}, "--top-k: found 5"),
        ({"layers": DENSE.layers}, f"--layers: found {DENSE.layers}, expected 1 to {DENSE.layers - 1}"),
        ({"layers": 1, "shared": 4}, "--shared: found 4, expected .* divides the intermediate_size 384"),
    ):
        with pytest.raises(SystemExit, match=message):
            upcycle(dense(tmp_path / message[2:8]), tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()
