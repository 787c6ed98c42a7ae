"""The manifest: which tensors differ, and how it is recorded and saved."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from fp8rl.numerics.digest import tensor_digest
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.manifest import Manifest, Recorder
from tests.support.definitions import every_tensor

SPEC = QuantSpec.preset("fp8_block_pow2")

MANIFEST = Manifest("7", "spec", {"a.weight": "11@7", "a.weight_scale_inv": "22", "norm": "33"})


def test_every_kind_of_difference_is_one_line_by_name() -> None:
    assert MANIFEST.differences(dict(reversed(MANIFEST.entries.items()))) == []
    assert MANIFEST.differences({"a.weight": "11@6", "norm": "34", "b": "55"}) == [
        "a.weight: found 11@6, expected 11@7",
        "a.weight_scale_inv: found no such tensor, expected 22",
        "b: found 55, expected no such tensor",
        "norm: found 34, expected 33",
    ]


def test_the_recorder_digests_what_passes_and_marks_what_is_dequantized() -> None:
    tensors = {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
        "norm": torch.ones(3, dtype=torch.bfloat16),
    }
    recorder = Recorder(every_tensor(layers=1).tensors)
    passed = dict(recorder.watch(tensors.items()))
    assert all(passed[name] is tensor for name, tensor in tensors.items())
    assert recorder.sent().bytes == 16 + 4 + 6
    delta = recorder.sent(payload=3)  # what is sent is not what the engine holds
    assert (delta.bytes, delta.weight_bytes) == (3, 16 + 4 + 6)
    manifest = Manifest.merged(7, SPEC, [recorder.sent()])
    assert (manifest.version, manifest.spec_digest) == ("7", SPEC.digest())
    assert manifest.entries == {
        "a.weight": tensor_digest(tensors["a.weight"]) + "@7",
        "a.weight_scale_inv": tensor_digest(tensors["a.weight_scale_inv"]),
        "norm": tensor_digest(tensors["norm"]),
    }


def test_a_digest_is_taken_before_the_tensor_is_handed_on() -> None:
    """Whatever happens to it afterwards is seen as a difference."""
    recorder = Recorder(every_tensor(layers=1).tensors)
    sent = torch.ones(8)
    before = tensor_digest(sent)
    for _, tensor in recorder.watch([("x", sent)]):
        tensor[3] = 5
    assert recorder.sent().digests == {"x": before} != {"x": tensor_digest(sent)}


def test_saved_whole_as_json(tmp_path: Path) -> None:
    path = tmp_path / "manifests" / "step_7.json"
    for manifest in (Manifest("6", "spec", {}), MANIFEST):
        manifest.save(path)
    entries = MANIFEST.entries
    expected = {"version": "7", "spec_digest": "spec", "entries": entries, "role": "policy"}
    assert json.loads(path.read_text()) == expected
    assert [file.name for file in path.parent.iterdir()] == ["step_7.json"]
