"""The log-probability kernels against float64 and against the torch op."""

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.kernels.logprobs import token_logprobs
from tests.support.kernels import DEVICE

# The interpreter's numpy warns of inf - inf and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
# Less than a block, several blocks, a whole number of them.
VOCABULARIES = (300, 9001, 8192)


def case(vocabulary, dtype=torch.float32, rows=6):
    """Logits with tokens that are excluded: a leading block, every other one; and given tokens that are not."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)
    tokens = torch.randint(0, vocabulary, (rows,), generator=generator)
    logits[1, : vocabulary - 100] = -torch.inf
    logits[2, ::2] = -torch.inf
    logits[3, :200] = torch.finfo(dtype).min
    tokens[1], tokens[2], tokens[3] = vocabulary - 1, 7, vocabulary - 3
    return logits.to(DEVICE), tokens.to(DEVICE)


def exact(logits, tokens, temperature):
    logps = (logits.double() / torch.as_tensor(temperature).float().double().to(DEVICE).unsqueeze(-1)).log_softmax(-1)
    entropy = -(logps.exp() * logps.masked_fill(logps.exp() == 0, 0.0)).sum(-1)
    return logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


@pytest.mark.slow
@pytest.mark.parametrize("op", (token_logprobs, ops.token_logprobs), ids=("triton", "torch"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_logprobs_entropy_and_gradient(vocabulary, dtype, op):
    logits, tokens = case(vocabulary, dtype)
    leaf, leaf64 = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprobs, entropy = op(leaf, tokens, 0.7)
    expected, expected_entropy = exact(leaf64, tokens, 0.7)
    # y - max - log(sum), each within an FP32 rounding of a number up to 50, which is 2e-6.
    assert torch.allclose(logprobs.double(), expected, rtol=0, atol=8e-6)
    assert torch.allclose(entropy.double(), expected_entropy, rtol=0, atol=1e-5)
    given = torch.linspace(-1, 1, len(logits), device=DEVICE)
    rounding = 2**-8 if dtype == torch.bfloat16 else 0
    for chosen in ((0,), (1,), (0, 1)):  # the logprobs alone, the entropy alone, both
        pairs = (given, given.flip(0)), (logprobs, entropy), (expected, expected_entropy)
        weights, found, oracle = ([pair[index] for index in chosen] for pair in pairs)
        (grad,) = torch.autograd.grad(found, leaf, weights, retain_graph=True)
        (grad64,) = torch.autograd.grad(oracle, leaf64, [each.double() for each in weights], retain_graph=True)
        assert grad.dtype == dtype and torch.allclose(grad.double(), grad64, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("op", (token_logprobs, ops.token_logprobs), ids=("triton", "torch"))
def test_an_entropy_that_is_not_asked_for_changes_no_bit(op):
    logits, tokens = case(9001, torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = op(leaf, tokens, 0.7)
    alone = torch.autograd.grad(logprobs.sum(), leaf, retain_graph=True)[0]
    weightless = torch.autograd.grad(logprobs.sum() + 0.0 * entropy.sum(), leaf)[0]
    assert torch.equal(alone, weightless)


def test_each_row_has_its_own_temperature():
    logits, tokens = case(500)
    temperature = torch.linspace(0.3, 2, len(logits), device=DEVICE)
    for op in (token_logprobs, ops.token_logprobs):
        leaf = logits.clone().requires_grad_()
        together = op(leaf, tokens, temperature)
        together[0].sum().backward()
        for row, value in enumerate(temperature.tolist()):
            single = logits[row : row + 1].clone().requires_grad_()
            alone = op(single, tokens[row : row + 1], value)
            alone[0].sum().backward()
            assert torch.equal(alone[0][0], together[0][row]) and torch.equal(alone[1][0], together[1][row])
            assert torch.equal(single.grad[0], leaf.grad[row])


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_every_batch_and_dtype():
    logits, tokens = case(9001, torch.bfloat16)
    whole = token_logprobs(logits, tokens, 0.9)
    for rows in (slice(3, 4), slice(1, 6), slice(0, 6, 2)):
        wider, transposed = logits.repeat(1, 2)[:, :9001], logits.t().contiguous().t()
        for some in (logits[rows], logits[rows].float(), wider[rows], transposed[rows]):
            part = token_logprobs(some, tokens[rows], torch.tensor(0.9))
            assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole))


@pytest.mark.slow
def test_any_number_of_leading_axes_and_strides():
    """As in the trainer: [S, B, V] transposed, without the last of each sequence."""
    logits, tokens = case(300)

    def gradient(given, targets):
        leaf = given.detach().requires_grad_()
        found = token_logprobs(leaf, targets, 1.0)
        (found[0] * torch.arange(1, targets.numel() + 1, device=DEVICE).view(targets.shape)).sum().backward()
        return *found, leaf.grad

    expected = gradient(logits.view(2, 3, 300)[:, :-1].reshape(4, 300), tokens.view(2, 3)[:, :-1].reshape(4))
    nested, targets = logits.view(2, 3, 300)[:, :-1], tokens.view(2, 3)[:, :-1]
    transposed = logits.view(2, 3, 300).transpose(0, 1).contiguous().transpose(0, 1)[:, :-1]
    for given in (nested, transposed):
        assert all(torch.equal(a.flatten(0, 1), b) for a, b in zip(gradient(given, targets), expected))
    assert token_logprobs(logits[:0], tokens[:0], 1.0)[0].shape == (0,)


def test_what_is_no_number_stays_none():
    logits, tokens = case(300)
    logits[0, 5], logits[1, :], tokens[2] = torch.nan, -torch.inf, 300
    logprobs, _ = token_logprobs(logits, tokens, 1.0)
    assert logprobs.isnan().tolist() == [True, True, True, False, False, False]
