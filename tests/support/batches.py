"""Batches and a loss for the trainer's tests."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.rollout.types import Completion
from fp8rl.trainer.step.batch import UNKNOWN, ObjectiveOutput, TokenBatch
from tests.support.models import EXPERTS, LAYERS, TOP_K, VOCAB


@dataclass(frozen=True)
class CrossEntropy:
    """Mean negative log-probability over `targets` tokens, the number in the whole batch."""

    targets: int

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        masked_entropy = (entropy * batch.loss_mask).sum() / self.targets
        return ObjectiveOutput(-(logprobs * batch.loss_mask).sum() / self.targets, {"entropy": masked_entropy})


@dataclass(frozen=True)
class Entropy:
    """Mean entropy over `targets` tokens, to be made larger."""

    targets: int

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        return ObjectiveOutput(-(entropy * batch.loss_mask).sum() / self.targets)


@dataclass(frozen=True)
class Poisoned:
    """A loss that is NaN for the micro-batch with the longest row, or whose gradient is NaN everywhere."""

    longest: int
    in_gradient: bool = False

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        if self.in_gradient:
            # sqrt has an infinite slope at zero, and zero times infinity is NaN, while the loss itself is zero.
            return ObjectiveOutput((logprobs * 0.0).square().sum().sqrt())
        return ObjectiveOutput(logprobs.sum() * (float("nan") if int(batch.lengths.max()) == self.longest else 1.0))


def random_batch(rows: int = 12, longest: int = 60, seed: int = 0, temperature: float = 1.0) -> TokenBatch:
    """Rows of 3 to `longest` random tokens, at least one of each; every token but the first is a target."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest + 1, (rows,), generator=generator)
    lengths[0], lengths[-1] = longest, 3
    tokens = torch.randint(0, VOCAB, (rows, longest), generator=generator)
    mask = torch.arange(longest) < lengths[:, None]
    mask[:, 0] = False
    return TokenBatch(tokens, lengths, mask, temperature)


def random_routes(batch: TokenBatch) -> Tensor:
    """Different experts for every token, drawn at random; none for a row's last token, as an engine reports them."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(batch.rows, batch.width, LAYERS, EXPERTS, generator=generator)
    routes = scores.topk(TOP_K).indices.sort(-1).values.to(torch.int16)
    routed = torch.arange(batch.width) < batch.lengths[:, None] - 1
    return torch.where(routed[..., None, None], routes, UNKNOWN)


def cross_entropy(batch: TokenBatch) -> CrossEntropy:
    return CrossEntropy(int(batch.loss_mask.sum()))


def batch_of_answers(prompts: list[list[int]], answers: list[Completion]) -> TokenBatch:
    """What an engine answered, with its log-probabilities in `rollout_logprobs`."""
    rows = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.stack([F.pad(torch.tensor(row), (0, int(lengths.max()) - len(row))) for row in rows])
    logprobs, mask = torch.zeros(tokens.shape), torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        span = slice(len(prompt), len(prompt) + len(answer.logprobs))
        logprobs[row, span], mask[row, span] = torch.tensor(answer.logprobs), True
    return TokenBatch(tokens, lengths, mask, 1.0, {"rollout_logprobs": logprobs})
