import dataclasses

import pytest
import torch

from fp8rl.trainer.step.batch import KeptTokenPool, TokenBatch
from tests.support.batches import random_batch


def make_batch(**changes: object) -> TokenBatch:
    values = {
        "tokens": torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0], [9, 10, 0, 0, 0]]),
        "lengths": torch.tensor([5, 3, 2]),
        "loss_mask": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 0, 0, 0]], dtype=torch.bool),
        "temperature": 0.7,
        "fields": {"advantages": torch.arange(15, dtype=torch.float32).reshape(3, 5)},
    }
    return TokenBatch(**{**values, **changes})


def test_select_takes_rows_in_order_and_trims_to_the_longest() -> None:
    chosen = make_batch().select([2, 1])

    assert chosen.tokens.tolist() == [[9, 10, 0], [6, 7, 8]]
    assert chosen.lengths.tolist() == [2, 3]
    assert chosen.loss_mask.tolist() == [[False, True, False], [False, True, True]]
    assert chosen.fields["advantages"].tolist() == [[10, 11, 12], [5, 6, 7]]
    assert chosen.temperature == 0.7
    assert (chosen.rows, chosen.width) == (2, 3)


def test_select_accepts_a_tensor_and_copies() -> None:
    batch = make_batch()
    chosen = batch.select(torch.tensor([0]))
    chosen.tokens[0, 0] = 99
    assert batch.tokens[0, 0] == 1
    assert chosen.tokens.is_contiguous()


def test_select_of_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        make_batch().select([])


def test_real_tokens_are_those_before_the_length() -> None:
    assert make_batch().real_tokens().sum(dim=1).tolist() == [5, 3, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.zeros(3, 5, dtype=torch.int32)}, "tokens: found torch.int32"),
        ({"tokens": torch.zeros(5, dtype=torch.int64)}, r"tokens: found shape \[5\]"),
        ({"tokens": torch.zeros(0, 5, dtype=torch.int64)}, "expected a non-empty"),
        ({"lengths": torch.tensor([5, 3])}, "lengths: found"),
        ({"lengths": torch.tensor([6, 3, 2])}, "found 2 to 6, expected 1 to 5"),
        ({"lengths": torch.tensor([5, 3, 0])}, "found 0 to 5"),
        ({"loss_mask": torch.zeros(3, 5)}, "loss_mask: found torch.float32"),
        ({"fields": {"advantages": torch.zeros(3, 4)}}, r"fields\['advantages'\]: found"),
        ({"fields": {"advantages": torch.zeros(3, 5, dtype=torch.float64)}}, "expected torch.float32"),
        (
            {"routes": torch.zeros(3, 4, 2, 2, dtype=torch.int16)},
            r"routes: found .*, expected torch.int16 \[3, 5, 2, 2\]",
        ),
        ({"routes": torch.zeros(3, 5, dtype=torch.int16)}, "routes: found"),
        ({"routes": torch.zeros(3, 5, 2, 2, dtype=torch.int64)}, "routes: found torch.int64"),
        ({"replay": True}, "replay: found True without routes"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_malformed_batches_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch(**changes)


@pytest.mark.parametrize(("place", "message"), [((1, 0), "index 0"), ((1, 3), "padding")])
def test_a_target_that_none_can_be_is_refused(place: tuple[int, int], message: str) -> None:
    mask = make_batch().loss_mask.clone()
    mask[place] = True
    with pytest.raises(ValueError, match=message):
        make_batch(loss_mask=mask)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_batch_on_the_gpu_is_selected_there() -> None:
    chosen = make_batch().to("cuda").select([2, 1])
    tensors = [chosen.tokens, chosen.lengths, chosen.loss_mask, *chosen.fields.values()]
    assert all(tensor.is_cuda for tensor in tensors)
    assert chosen.tokens.tolist() == [[9, 10, 0], [6, 7, 8]]


def test_routes_go_with_their_rows_and_the_padding_has_none() -> None:
    routes = torch.arange(3 * 5 * 2 * 2, dtype=torch.int16).reshape(3, 5, 2, 2)
    batch = make_batch(routes=routes, replay=True)
    chosen = batch.select([2, 1])
    assert chosen.replay and torch.equal(chosen.routes, routes[[2, 1], :3])
    assert torch.equal(batch.to("cpu").routes, routes) and batch.to("cpu").replay
    padded = chosen.padded(4)
    assert (padded.width, padded.replay) == (4, True)
    assert torch.equal(padded.routes[:, :3], chosen.routes) and (padded.routes[:, 3] == -1).all()
    assert padded.tokens.tolist() == [[9, 10, 0, 0], [6, 7, 8, 0]]
    assert padded.loss_mask.tolist() == [[False, True, False, False], [False, True, True, False]]
    assert padded.fields["advantages"][:, 3].tolist() == [0, 0]


def seeded(rows: int, width: int, first_seed: int) -> TokenBatch:
    mask = (torch.arange(width) > 0).expand(rows, width).clone()
    tokens = torch.arange(rows * width).view(rows, width)
    seeds = torch.arange(first_seed, first_seed + rows)
    fields = {"rollout_logprobs": tokens.float()}
    return TokenBatch(tokens, torch.full((rows,), width), mask, 0.5, fields, seeds=seeds)


def test_seeds_go_with_their_rows() -> None:
    batch = seeded(3, 4, 10)
    assert batch.select([2, 0]).seeds.tolist() == [12, 10]
    assert batch.padded(6).seeds.tolist() == batch.to("cpu").seeds.tolist() == [10, 11, 12]
    with pytest.raises(ValueError, match="seeds"):
        dataclasses.replace(batch, seeds=torch.zeros(2, dtype=torch.int64))


def test_rows_of_another_batch_follow() -> None:
    both = seeded(1, 4, 1).followed_by(seeded(2, 4, 7))
    assert both.rows == 3 and both.seeds.tolist() == [1, 7, 8] and both.temperature == 0.5
    assert both.fields["rollout_logprobs"][1].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="two temperatures"):
        seeded(1, 4, 1).followed_by(dataclasses.replace(seeded(1, 4, 1), temperature=1.0))


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
