"""What each token was drawn from, carried beside a batch in a few numbers."""

import dataclasses

import torch

from fp8rl.trainer.step.batch import KeptTokenPool
from tests.support.batches import random_batch


def test_supports_follow_their_rows_wherever_these_go() -> None:
    batch = random_batch(rows=4, longest=9)
    places = batch.loss_mask.nonzero().tolist()
    sets = {(row, at): [batch.tokens[row, at].item() + n for n in range(1 + (row + at) % 3)] for row, at in places}
    counts = torch.tensor([len(ids) for ids in sets.values()])
    supports = KeptTokenPool.of(batch.loss_mask, counts, torch.tensor([t for ids in sets.values() for t in ids]))
    batch = dataclasses.replace(batch, supports=supports)

    def found(batch, row, at):
        assert batch.supports is not None
        place = batch.supports.at[row, at]
        return batch.supports.pool[place + 1 : place + 1 + batch.supports.pool[place]].tolist()

    moved = batch.select([2, 1]).padded(12).followed_by(batch.select([3, 0]).padded(12)).to("cpu")
    for row, source in enumerate((2, 1, 3, 0)):
        for at in range(12):
            assert found(moved, row, at) == sets.get((source, at), [])
    kept = dataclasses.replace(supports, at=supports.at.flatten()).kept(200).view(*supports.at.shape, 200)
    for row, at in places:
        assert kept[row, at].nonzero().flatten().tolist() == sets[row, at]
    assert not kept[~batch.loss_mask].any()
