"""Attention over sequences that lie end to end against attention over padded ones."""

import torch

from fp8rl.numerics import ops


def test_sequences_end_to_end_have_the_bits_of_padded_ones():
    """The gradient of keys is added up over as many queries as there are; padding cuts this sum at other places, which
    turns a last bit of BF16 here and there."""
    torch.manual_seed(0)
    lengths = torch.tensor([5, 140, 1, 33, 64, 129])
    real = torch.arange(150) < lengths[:, None]
    q, dout = torch.randn(2, *real.shape, 4, 32).bfloat16() * real[..., None, None]
    k, v = torch.randn(2, *real.shape, 2, 32).bfloat16() * real[..., None, None]

    def passed(dtype, dout, op, *leaves):
        leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
        out = op(*leaves)
        out.backward(dout.to(dtype))
        return [out.detach(), *(x.grad for x in leaves)]

    positions = torch.arange(150).expand(real.shape)
    for dtype, bound in ((torch.bfloat16, 1e-3), (torch.float32, 1e-6)):
        padded = passed(dtype, dout, lambda *x: ops.attention(*x, positions, 0.1), q, k, v)
        parts = [x[real] for x in (q, k, v)]
        packed = passed(dtype, dout[real], lambda *x: ops.packed_attention(*x, lengths, 0.1), *parts)
        assert torch.equal(packed[0], padded[0][real])
        for found, expected in zip(packed[1:], padded[1:]):
            assert (found - expected[real]).norm() <= bound * expected.norm()


def test_equal_lengths_have_the_gradients_of_a_batch_too():
    torch.manual_seed(0)
    q, dout = torch.randn(2, 3, 40, 4, 32).bfloat16()
    k, v = torch.randn(2, 3, 40, 2, 32).bfloat16()

    def passed(dout, op, *leaves):
        leaves = [x.clone().requires_grad_() for x in leaves]
        op(*leaves).backward(dout)
        return [x.grad for x in leaves]

    positions = torch.arange(40).expand(3, 40)
    batch = passed(dout, lambda *x: ops.attention(*x, positions, 0.1), q, k, v)
    lengths = torch.full((3,), 40)
    parts = [x.flatten(0, 1) for x in (q, k, v)]
    packed = passed(dout.flatten(0, 1), lambda *x: ops.packed_attention(*x, lengths, 0.1), *parts)
    assert all(torch.equal(found, expected.flatten(0, 1)) for found, expected in zip(packed, batch))
