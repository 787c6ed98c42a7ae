"""A batch's fields go with their rows, and what does not fit together is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.kept_tokens import KeptTokenPool
from tests.support.batches import random_batch

ROUTES = torch.arange(3 * 5 * 2 * 2, dtype=torch.int16).reshape(3, 5, 2, 2)
PLACES = torch.arange(15).view(3, 5)
BATCH = TokenBatch(
    tokens=torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0], [9, 10, 0, 0, 0]]), lengths=torch.tensor([5, 3, 2]),
    loss_mask=torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 0, 0, 0]], dtype=torch.bool), temperature=0.7,
    fields={"advantages": torch.arange(15, dtype=torch.float32).reshape(3, 5)}, routes=ROUTES, replay=True,
    seeds=torch.tensor([10, 11, 12]),
)  # fmt: skip


def test_rows_are_chosen_in_order_trimmed_to_the_longest_and_padded() -> None:
    for rows in ([2, 1], torch.tensor([2, 1])):
        chosen = BATCH.select(rows)
        assert chosen.tokens.tolist() == [[9, 10, 0], [6, 7, 8]] and chosen.lengths.tolist() == [2, 3]
        assert chosen.fields["advantages"].tolist() == [[10, 11, 12], [5, 6, 7]]
        assert (chosen.rows, chosen.width, chosen.temperature, chosen.replay) == (2, 3, 0.7, True)
        assert torch.equal(chosen.routes, ROUTES[[2, 1], :3]) and chosen.seeds.tolist() == [12, 11]
    padded = chosen.padded(4).to("cpu")
    assert torch.equal(padded.routes[:, :3], chosen.routes) and (padded.routes[:, 3] == -1).all() and padded.replay
    assert padded.tokens.tolist() == [[9, 10, 0, 0], [6, 7, 8, 0]] and padded.seeds.tolist() == [12, 11]
    assert padded.loss_mask.tolist() == [[False, True, False, False], [False, True, True, False]]
    assert padded.fields["advantages"][:, 3].tolist() == [0, 0] and BATCH.real_tokens().sum(dim=1).tolist() == [5, 3, 2]
    chosen.tokens[0, 0] = 99
    assert BATCH.tokens[2, 0] == 9 and chosen.tokens.is_contiguous()
    with pytest.raises(ValueError, match="at least one row"):
        BATCH.select([])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"tokens": torch.zeros(3, 5, dtype=torch.int32)}, "tokens: found torch.int32"),
     ({"lengths": torch.tensor([6, 3, 2])}, "found 2 to 6, expected 1 to 5"),
     ({"loss_mask": BATCH.loss_mask | (PLACES == 5)}, "index 0"),
     ({"loss_mask": BATCH.loss_mask | (PLACES == 8)}, "padding"),
     ({"fields": {"advantages": torch.zeros(3, 4)}}, r"fields\['advantages'\]: found"),
     ({"routes": torch.zeros(3, 4, 2, 2).short()}, r"routes: found .*, expected torch.int16 \[3, 5, 2, 2\]"),
     ({"routes": None}, "replay: found True and no routes"), ({"temperature": 0.0}, "temperature"),
     ({"temperature": float("nan")}, "temperature"), ({"seeds": torch.zeros(2, dtype=torch.int64)}, "seeds")],
)  # fmt: skip
def test_malformed_batches_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BATCH, **changes)


def test_rows_of_another_batch_follow() -> None:
    plain = dataclasses.replace(BATCH, routes=None, replay=False)
    both = plain.select([1]).followed_by(plain.select([2, 1]))
    assert both.rows == 3 and both.seeds.tolist() == [11, 12, 11] and both.temperature == 0.7
    assert both.fields["advantages"][1].tolist() == [10, 11, 12]
    for other in (BATCH, dataclasses.replace(plain, temperature=1.0)):
        with pytest.raises(ValueError, match="routes or two temperatures"):
            plain.followed_by(other)


def test_supports_follow_their_rows_wherever_these_go() -> None:
    batch = random_batch(rows=4, longest=9)
    places = batch.loss_mask.nonzero().tolist()
    sets = {(row, at): [batch.tokens[row, at].item() + n for n in range(1 + (row + at) % 3)] for row, at in places}
    counts = torch.tensor([len(ids) for ids in sets.values()])
    supports = KeptTokenPool.of(batch.loss_mask, counts, torch.tensor([t for ids in sets.values() for t in ids]))
    batch = dataclasses.replace(batch, supports=supports)
    moved = batch.select([2, 1]).padded(12).followed_by(batch.select([3, 0]).padded(12)).to("cpu").supports
    for row, source in enumerate((2, 1, 3, 0)):
        for at in range(12):
            place = moved.at[row, at]
            assert moved.pool[place + 1 : place + 1 + moved.pool[place]].tolist() == sets.get((source, at), [])
    kept = dataclasses.replace(supports, at=supports.at.flatten()).kept(200).view(*supports.at.shape, 200)
    for row, at in places:
        assert kept[row, at].nonzero().flatten().tolist() == sets[row, at]
    assert not kept[~batch.loss_mask].any()
