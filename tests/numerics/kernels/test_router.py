"""The router kernels against the torch op and float64."""

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.kernels.router import route, route_sigmoid
from fp8rl.numerics.ops.experts import sigmoid
from tests.support.kernels import DEVICE

# The interpreter's numpy warns of inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
# Tokens, experts, experts of a token.
SHAPES = [(9, 8, 2), (5, 60, 8), (3, 512, 16), (6, 128, 8), (2, 1, 1), (4, 7, 7)]


def logits_of(tokens, experts, dtype=torch.float32):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("renormalize", (True, False))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route(shape, renormalize, dtype):
    tokens, experts, top_k = shape
    logits = logits_of(tokens, experts, dtype)
    logits[0] = 0  # ties
    leaf, leaf64 = logits.clone().requires_grad_(), logits.double().requires_grad_()
    probs, chosen = route(leaf, top_k, renormalize)
    assert probs.dtype == torch.float32 and chosen.dtype == torch.int64 and chosen[0].tolist() == list(range(top_k))
    assert torch.equal(chosen, ops.route(logits, top_k, renormalize)[1])
    expected = leaf64.softmax(-1).gather(1, chosen)
    expected = expected / expected.sum(-1, keepdim=True) if renormalize else expected
    # exp, two sums of 512 and two divisions in FP32.
    assert torch.allclose(probs.double(), expected, rtol=4e-6, atol=0)
    given = torch.randn(probs.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    probs.backward(given)
    expected.backward(given.double())
    assert torch.allclose(leaf.grad.double(), leaf64.grad, rtol=2**-8 if dtype == torch.bfloat16 else 0, atol=1e-6)


@pytest.mark.parametrize("renormalize", (True, False))
def test_experts_that_are_chosen_elsewhere_have_the_same_bits(renormalize):
    logits = logits_of(21, 60)
    probs, chosen = route(logits, 8, renormalize)
    replayed, experts = route(logits, 8, renormalize, chosen.t().contiguous().t().flip(1))
    assert torch.equal(replayed, probs) and torch.equal(experts, chosen)
    with pytest.raises(UserError, match="top_k: found 61, expected 1 to 60"):
        route(logits, 61, renormalize)
    others = (chosen + 1) % 60
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    (found, experts), (expected, _) = (op(x, 8, renormalize, others) for op, x in zip((route, ops.route), leaves))
    assert torch.equal(experts, others.sort(-1).values) and torch.allclose(found, expected, rtol=4e-6, atol=0)
    for probs in (found, expected):
        probs[:, 0].sum().backward()
    assert leaves[0].grad.any() and torch.allclose(leaves[0].grad, leaves[1].grad, rtol=0, atol=1e-6)


def test_a_token_has_the_same_bits_in_every_batch_and_dtype():
    logits = logits_of(21, 60, torch.bfloat16)
    probs, experts = route(logits, 8, True)
    for rows in ([20], [3, 9], list(range(7))):
        for some in (logits[rows], logits[rows].float(), logits.t().contiguous().t()[rows]):
            part = route(some, 8, True)
            assert torch.equal(part[0], probs[rows]) and torch.equal(part[1], experts[rows])
    assert route(logits[:0], 8, True)[0].shape == (0, 8)


def test_ties_and_numbers_that_are_none():
    """NaN probabilities are the highest, as in torch's sort; a token without numbers goes to the first experts."""
    logits = logits_of(5, 60)
    logits[0, :] = 1.0
    logits[1, 7] = torch.nan
    logits[2, :] = -torch.inf
    logits[3, 8:] = -torch.inf
    logits[4, 9] = torch.inf
    probs, experts = route(logits, 16, True)
    expected, expected_experts = ops.route(logits, 16, True)
    assert torch.equal(experts, expected_experts) and torch.allclose(probs, expected, rtol=4e-6, atol=0, equal_nan=True)


# Experts, groups, kept groups, experts of a token: DeepSeek-V3, GLM-4.5, and groups of odd sizes.
GROUPED = [(256, 8, 4, 8), (128, 1, 1, 8), (60, 5, 2, 8), (8, 4, 2, 2), (7, 1, 1, 7)]


def by_hand(logits, bias, groups, kept, top_k):
    """The experts of each token, sorted, by DeepSeek-V3's report."""
    chosen = []
    for scores in (logits.sigmoid() + bias).tolist():
        size = len(scores) // groups
        runs = [range(first, first + size) for first in range(0, len(scores), size)]
        best = sorted(runs, key=lambda run: -sum(sorted((scores[e] for e in run), reverse=True)[:2]))[:kept]
        chosen.append(sorted(sorted(sorted(e for run in best for e in run), key=lambda e: -scores[e])[:top_k]))
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("implementation", (ops.route_sigmoid, route_sigmoid), ids=("torch", "kernel"))
@pytest.mark.parametrize("renormalize", (True, False))
@pytest.mark.parametrize("shape", GROUPED, ids=str)
def test_a_sigmoid_router_with_groups_and_a_bias(shape, renormalize, implementation):
    experts, groups, kept, top_k = shape
    logits = logits_of(9, experts) * 2
    bias = torch.linspace(-0.4, 0.4, experts, device=DEVICE).flip(0)
    leaf, leaf64 = logits.clone().requires_grad_(), logits.double().requires_grad_()
    probs, chosen = implementation(leaf, bias, top_k, groups, kept, renormalize, 2.5)
    assert chosen.tolist() == by_hand(logits.cpu(), bias.cpu(), groups, kept, top_k)
    expected = leaf64.sigmoid().gather(1, chosen)
    expected = 2.5 * (expected / (expected.sum(-1, keepdim=True) + 1e-20) if renormalize else expected)
    assert probs.dtype == torch.float32 and torch.allclose(probs.double(), expected, rtol=2e-6, atol=0)
    given = torch.randn(probs.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    probs.backward(given)
    expected.backward(given.double())
    assert torch.allclose(leaf.grad.double(), leaf64.grad, rtol=0, atol=1e-6)
    for rows in ([7], [2, 8]):
        part = implementation(logits[rows], bias, top_k, groups, kept, renormalize, 2.5)
        assert torch.equal(part[0], probs[rows]) and torch.equal(part[1], chosen[rows])
    again = implementation(logits, bias, top_k, groups, kept, renormalize, 2.5, chosen.flip(1))
    assert torch.equal(again[0], probs) and torch.equal(again[1], chosen)


@pytest.mark.parametrize("implementation", (ops.route_sigmoid, route_sigmoid), ids=("torch", "kernel"))
def test_of_equal_experts_and_groups_the_lower(implementation):
    logits, bias = torch.zeros(2, 32, device=DEVICE), torch.zeros(32, device=DEVICE)
    bias[31] = -9  # the last group's
    probs, chosen = implementation(logits, bias, 8, 8, 4, True, 2.5)
    assert chosen.tolist() == [list(range(8))] * 2 and torch.allclose(probs, torch.full((2, 8), 2.5 / 8, device=DEVICE))
    with pytest.raises(UserError, match="top_k: found 9, expected 1 to 8"):
        route_sigmoid(logits, bias, 9, 8, 2, True, 2.5)


@pytest.mark.parametrize("implementation", (ops.route_sigmoid, route_sigmoid), ids=("torch", "kernel"))
@pytest.mark.parametrize("renormalize", (True, False))
def test_the_gradient_of_logits_far_from_zero_is_finite(renormalize, implementation):
    """Below -88.7, exp(-x) is infinite in FP32: in an expert that is chosen, and in one that is not."""
    logits = torch.tensor([[1.0, -120.0, 0.5, 120.0], [-120.0, -119.0, -118.0, 3.0], [-88.0, -89.0, 88.0, 89.0]]).to(
        DEVICE
    )
    leaf, leaf64 = logits.clone().requires_grad_(), logits.double().requires_grad_()
    probs, chosen = implementation(leaf, torch.zeros(4, device=DEVICE), 2, 1, 1, renormalize, 2.5)
    expected = leaf64.sigmoid().gather(1, chosen)
    expected = 2.5 * (expected / (expected.sum(-1, keepdim=True) + 1e-20) if renormalize else expected)
    assert torch.allclose(probs.double(), expected, rtol=2e-6, atol=1e-30)
    given = torch.tensor([[1.0, -2.0]], device=DEVICE).expand_as(probs)
    probs.backward(given)
    expected.backward(given.double())
    assert torch.allclose(leaf.grad.double(), leaf64.grad, rtol=1e-5, atol=1e-6)


def test_the_sigmoid_has_the_bits_of_its_formula():
    x = torch.linspace(-120, 120, 4001, device=DEVICE)
    assert torch.equal(sigmoid(x), 1 / (1 + torch.exp(-x)))
    leaf, leaf64 = x.clone().requires_grad_(), x.double().requires_grad_()
    sigmoid(leaf).sum().backward()
    leaf64.sigmoid().sum().backward()
    assert torch.allclose(leaf.grad.double(), leaf64.grad, rtol=1e-5, atol=1e-7)
