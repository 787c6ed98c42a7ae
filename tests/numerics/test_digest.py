import math

import pytest
import torch

from fp8rl.numerics.digest import CHUNK, stack_digests, tensor_digest, tensor_digests

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.uint8)


def random_bytes(count, seed=0):
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bytes_equal_digest_whatever_the_storage(dtype):
    x = random_bytes(8 * 300).view(dtype).reshape(3, -1)
    shifted = torch.cat((random_bytes(3), x.reshape(-1).view(torch.uint8)))[3:].clone().view(dtype).reshape(x.shape)
    strided = torch.stack((x, x), -1)[..., 0]
    assert tensor_digest(x) == tensor_digest(shifted) == tensor_digest(strided)


def test_every_flipped_bit_is_seen_and_flips_that_could_cancel():
    """Two sign bits at the top of their words: equal changes under any arithmetic that ignores the position."""
    x = random_bytes(40)
    digests = {tensor_digest(x)}
    for index in range(40):
        for bit in range(8):
            flipped = x.clone()
            flipped[index] ^= 1 << bit
            digests.add(tensor_digest(flipped))
    assert len(digests) == 1 + 40 * 8
    x = random_bytes(4096)
    digests = {tensor_digest(x)}
    for second in range(7, 4096, 4):
        flipped = x.clone()
        flipped[3] ^= 128
        flipped[second] ^= 128
        digests.add(tensor_digest(flipped))
    assert len(digests) == 1 + 1023


def test_moved_bytes_are_seen_across_chunks():
    chunk = 4 * CHUNK  # bytes that share one table of weights
    x = random_bytes(3 * chunk + 5)
    words = x[: 3 * chunk].view(torch.int64)
    # Among them the pair whose word and chunk numbers are each other's.
    for a, b in ((0, 1), (0, chunk // 8), (5, 2 * chunk // 8 + 5), (1, 2 * chunk // 8)):
        moved = x.clone()
        view = moved[: 3 * chunk].view(torch.int64)
        view[a], view[b] = words[b].clone(), words[a].clone()
        assert tensor_digest(moved) != tensor_digest(x)
    swapped = torch.cat((x[chunk : 2 * chunk], x[:chunk], x[2 * chunk :]))
    assert tensor_digest(swapped) != tensor_digest(x)


def test_shape_dtype_and_trailing_zeros_count():
    x = torch.zeros(16, dtype=torch.uint8)
    others = (x[:8], x.reshape(4, 4), x.view(torch.int64), x.view(torch.bfloat16), torch.zeros(0))
    assert len({tensor_digest(t) for t in (x, *others)}) == 6


def test_many_at_once_are_each_alone():
    sizes = (3, 4 * CHUNK, 12 * CHUNK + 8, 3, 40 * CHUNK, 12 * CHUNK + 8)
    tensors = [random_bytes(size, seed=seed) for seed, size in enumerate(sizes)]
    assert tensor_digests(tensors) == [tensor_digest(tensor) for tensor in tensors] and tensor_digests([]) == []


@pytest.mark.parametrize("shape", [(9,), (5, 0), (4, 3, 3), (6, 2 * CHUNK), (3, 9, 4 * CHUNK + 4)])
def test_tensors_in_a_stack_are_each_alone(shape):
    whole = random_bytes(math.prod(shape)).view(shape)
    parts = [whole, whole[1::2], *([whole.mT, whole[:, 1:3], whole[..., :-1]] if len(shape) > 2 else [])]
    assert stack_digests(parts) == [tensor_digest(tensor) for stack in parts for tensor in stack]
