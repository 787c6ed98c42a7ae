"""Digests by the kernel are those by torch, for tensors of any length, in one launch."""

import torch

from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.digest import CHUNK, chunk_sums, tensor_digest, tensor_digests
from fp8rl.numerics.kernels import digest
from tests.support.kernels import DEVICE


def tensors():
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 4, 7, 4 * CHUNK, 4 * CHUNK + 3, 10 * CHUNK + 12, 128)
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator).to(DEVICE) for size in sizes]


def test_the_kernel_gives_the_digests_of_torch():
    expected = [tensor_digest(tensor) for tensor in tensors()]
    with using("triton"):
        assert tensor_digests(tensors()) == expected
        assert tensor_digests(tensors()[::-1]) == expected[::-1]
        assert [tensor_digest(tensor) for tensor in tensors()] == expected, "aligned, where others in a launch are not"


def test_tensors_of_a_cpu_are_summed_where_kernels_are_compiled(monkeypatch):
    """No compiled kernel reads them."""
    words = [tensor.cpu()[:64].view(torch.int32) for tensor in tensors() if len(tensor) >= 64]
    expected = chunk_sums(words)
    monkeypatch.setattr(digest, "_kernel", None)
    monkeypatch.setattr(digest.triton.knobs.runtime, "interpret", False)
    with using("triton"):
        assert chunk_sums(words).equal(expected)
