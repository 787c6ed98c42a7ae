"""Makes micro-batches whose rows share prefixes. The model computes a shared prefix only once.

Answers to one prompt, and branches of a conversation, have a common prefix. In exact mode the bits of a token depend
only on the tokens before it. So rows in lexicographic order can form a prefix tree (`numerics.ops.trees`). Each row
adds only the tokens after its common prefix with the row before. The log-probability of a token comes from the hidden
state of the token before it, which several tokens may follow. A shared token's gradients are summed, then rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from fp8rl.numerics.ops import TokenTree, gathered
from fp8rl.numerics.sampling import GREEDY
from fp8rl.trainer import device
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.modules.rows import PackedRows
from fp8rl.trainer.step.batch import LIKELY_IDS, TokenBatch
from fp8rl.trainer.step.kept_tokens import NOT_CARRIED
from fp8rl.trainer.step.microbatches import MicroBatch, PackedMicroBatch, SharedMicroBatch, rows_of

SAVED_SAMPLED, SAVED_OTHER = "train/saved_sampled_tokens", "train/saved_other_tokens"


@dataclass(frozen=True, kw_only=True)
class TreeMicroBatch(PackedMicroBatch):
    """Rows of a batch as a prefix tree in one row of the model's input [1, T], padded like packed rows.

    In this class, a number of a token is its index in `batch.tokens.flatten()`. `index` has a number for each of the T
    tokens, from one of the rows that share the token.
    """

    numbers: Tensor
    """int64 [R], the numbers of all tokens that are no padding."""
    places: Tensor
    """int64 [R], for each of `numbers` the index of its token in the tree."""
    targets: Tensor
    """int64 [N], the number of each target. A token of the tree is a separate target for each way in which rows score
    or draw it. The last target is repeated until N is a multiple of the padding."""
    parents: Tensor
    """int64 [N], for each target the index in the tree of the token before it."""
    asked: Tensor
    """int64 [M], the numbers of the tokens with a log-probability: all tokens of a row except the first."""
    target_of: Tensor
    """int64 [M], for each of `asked` its index in `targets`."""

    @classmethod
    def plan(cls, batch: TokenBatch, dp_size: int, budget: int, multiple: int) -> list[list[list[int]]]:
        return plan_trees(token_keys(batch), batch.lengths.tolist(), dp_size, budget, multiple)

    @classmethod
    def of(cls, batch: TokenBatch, rows: list[int], multiple: int) -> TreeMicroBatch:
        chosen = rows_of(batch, rows)
        tree, index, place = build_tree(token_keys(chosen), chosen.lengths.tolist())
        real, positions = len(index), index % chosen.width
        numbers = chosen.real_tokens().flatten().nonzero()[:, 0]
        targets, parents, asked, target_of = _targets(chosen, place, multiple)
        if padding := -real % multiple:
            tree = _padded(tree, real, padding)
            index = torch.cat([index, index[-1:].expand(padding)])
            positions = torch.cat([positions, torch.arange(padding)])
        here = device.current()
        layout = PackedRows.of(torch.tensor([len(positions)]))  # to code that does not know trees it is one row
        layout.positions, layout.tree = positions.to(here), tree.to(here)
        return cls(
            rows,
            chosen.to(here),
            layout,
            index=index.to(here),
            real=real,
            numbers=numbers.to(here),
            places=place.flatten()[numbers].to(here),
            targets=targets.to(here),
            parents=parents.to(here),
            asked=asked.to(here),
            target_of=target_of.to(here),
        )

    def from_model(self, values: Tensor, padding: int = 0) -> Tensor:
        return self._placed(self.numbers, gathered(values[0], self.places), padding)

    def predictors(self, hidden: Tensor) -> Tensor:
        parents, ranks = self.parents, len(self.index) // len(hidden)
        if ranks > 1:  # a target and the token before it may be of different ranks
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
            parents = parents.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return gathered(hidden.flatten(0, 1), parents).unsqueeze(1)

    def targets_of(self, values: Tensor) -> Tensor:
        return values.flatten()[self.targets]

    def from_targets(self, values: Tensor, padding: int = 0) -> Tensor:
        return self._placed(self.asked, gathered(values, self.target_of), padding)[:, 1:]

    def metrics(self) -> dict[str, Tensor]:
        batch, computed = self.batch, self.index[: self.real]
        sampled = batch.loss_mask.sum() - batch.loss_mask.flatten()[computed].sum()
        return {SAVED_SAMPLED: sampled, SAVED_OTHER: batch.lengths.sum() - self.real - sampled}


def form_of(config: TrainerSection) -> type[MicroBatch]:
    """Return the class of micro-batches for a trainer's `cp`, `prefix_sharing` and `packing`."""
    if config.cp > 1:
        return SharedMicroBatch
    if config.prefix_sharing:
        return TreeMicroBatch
    return PackedMicroBatch if config.packing else MicroBatch


def with_tree_ratio(metrics: dict[str, float], batch: TokenBatch) -> dict[str, float]:
    """If a pass used trees, add to its metrics the fraction of the batch's tokens that the model computed."""
    if SAVED_OTHER not in metrics:
        return metrics
    saved = metrics[SAVED_SAMPLED] + metrics[SAVED_OTHER]
    return metrics | {"train/tree_ratio": 1 - saved / int(batch.lengths.sum())}


def token_keys(batch: TokenBatch) -> np.ndarray:
    """Return int16 [B, S, C], a key for each token. Tokens with equal keys and prefixes are one token of a tree. A key
    is the token's id. If routes are replayed, it also has the experts, because engines may have chosen others."""
    keys = batch.tokens.cpu().contiguous().numpy().view(np.int16).reshape(*batch.tokens.shape, -1)
    if not batch.replay:
        return keys
    assert batch.routes is not None
    return np.concatenate([keys, batch.routes.cpu().flatten(2).numpy()], -1)


def build_tree(keys: np.ndarray, lengths: list[int]) -> tuple[TokenTree, Tensor, Tensor]:
    """Build the prefix tree of rows, on the CPU. keys: [B, S, C] from `token_keys`.

    Return the tree; int64 [T], for each token of the tree its number (0 to B * S - 1) in the first row that has it; and
    int64 [B, S], for each token of a row its index in the tree, with 0 in the padding.
    """
    rows, width = keys.shape[:2]
    place = np.zeros((rows, width), np.int64)
    order, shared = _in_order(keys, lengths)
    index, flat, first, new = [], [], [], []
    tokens, before, laid = 0, 0, 0
    end = np.zeros(sum(lengths), np.int64)
    for row, common in zip(order, shared, strict=True):
        fresh = lengths[row] - common
        place[row, :common] = place[before, :common]
        place[row, common : lengths[row]] = np.arange(tokens, tokens + fresh)
        end[place[before, common : lengths[before]]] = tokens  # these have no further rows
        index.append(row * width + np.arange(common, lengths[row]))
        first.append(laid + np.arange(common, lengths[row]))
        flat.append(place[row, : lengths[row]])
        new.append(fresh)
        tokens, before, laid = tokens + fresh, row, laid + lengths[row]
    end[place[before, : lengths[before]]] = tokens
    tree = TokenTree(
        new=torch.tensor(new),
        lengths=torch.tensor([lengths[row] for row in order]),
        table=torch.from_numpy(place[order]).int(),
        end=torch.from_numpy(end[:tokens].copy()),
        flat=torch.from_numpy(np.concatenate(flat)),
        first=torch.from_numpy(np.concatenate(first)),
    )
    return tree, torch.from_numpy(np.concatenate(index)), torch.from_numpy(place)


def plan_trees(keys: np.ndarray, lengths: list[int], dp_size: int, budget: int, multiple: int) -> list[list[list[int]]]:
    """Assign rows to ranks and micro-batches, as `plan_packed` does for packed rows. A shared prefix counts once.

    Rows in lexicographic order are cut into as few runs as the budget allows, with about equal numbers of tokens. A
    run is a micro-batch. A prefix that rows on both sides of a cut share is in both runs.
    """
    order, shared = _in_order(keys, lengths)

    def cut(room: int) -> list[tuple[int, list[int]]]:
        """Return (number of tokens, rows) of each run. A run has at most `room` tokens, or one longer row."""
        runs: list[tuple[int, list[int]]] = []
        for row, common in zip(order, shared, strict=True):
            tokens = runs[-1][0] + lengths[row] - common if runs else room + 1
            if tokens <= room:
                runs[-1] = tokens, [*runs[-1][1], row]
            else:
                runs.append((lengths[row], [row]))
        return runs

    room = max(budget // multiple, 1) * multiple
    count = -(-len(cut(room)) // dp_size) * dp_size
    low, high = 1, room
    while low < high:  # the least room with which they are no more
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= count else (middle + 1, high)
    runs = sorted(cut(high), key=lambda run: -run[0])
    micro = [rows for _, rows in runs] + [[] for _ in range(count - len(runs))]
    return [micro[rank::dp_size] for rank in range(dp_size)]


def _in_order(keys: np.ndarray, lengths: list[int]) -> tuple[list[int], list[int]]:
    """Return the rows in lexicographic order, and for each the length of its common prefix with the row before."""
    order = sorted(range(len(lengths)), key=lambda row: keys[row, : lengths[row]].tobytes())
    shared = [0]
    for before, row in pairwise(order):
        both = min(lengths[before], lengths[row])
        differ = (keys[before, :both] != keys[row, :both]).any(-1)
        shared.append(int(differ.argmax()) if differ.any() else both)
    return order, shared


def _targets(batch: TokenBatch, place: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `targets`, `parents`, `asked` and `target_of` of a micro-batch. A shared token is several targets if rows
    draw it with different seeds, supports or likeliest tokens, or if some rows do not draw it."""
    asks = batch.real_tokens()
    asks[:, 0] = False
    if not asks.any():
        asks[0, 0] = True  # the head needs something to compute
    asked = asks.flatten().nonzero()[:, 0]
    seeds = torch.full_like(batch.lengths, GREEDY) if batch.seeds is None else batch.seeds
    supports = torch.full_like(batch.tokens, NOT_CARRIED) if batch.supports is None else batch.supports.at
    drawn = torch.where(batch.loss_mask, seeds[:, None], GREEDY)
    likely = batch.fields.get(LIKELY_IDS, torch.empty(*batch.tokens.shape, 0)).long()
    ways = torch.cat([torch.stack([place, drawn, batch.loss_mask.long(), supports], -1), likely], -1)
    ways = ways.flatten(0, 1)[asked]
    kinds, target_of = ways.unique(dim=0, return_inverse=True)
    targets = torch.empty(len(kinds), dtype=torch.int64)
    targets[target_of] = asked  # any of the rows that ask for it in this way
    targets = torch.cat([targets, targets[-1:].expand(-len(targets) % multiple)])
    return targets, place.flatten()[(targets - 1).clamp(min=0)], asked, target_of


def _padded(tree: TokenTree, tokens: int, padding: int) -> TokenTree:
    """Append a separate row of `padding` tokens to a tree. tokens: the tree's number of tokens."""
    added = torch.arange(tokens, tokens + padding)
    table = tree.table.new_zeros(len(tree.table) + 1, max(tree.table.shape[1], padding))
    table[:-1, : tree.table.shape[1]] = tree.table
    table[-1, :padding] = added
    count = torch.tensor([padding])
    return TokenTree(
        new=torch.cat([tree.new, count]),
        lengths=torch.cat([tree.lengths, count]),
        table=table,
        end=torch.cat([tree.end, torch.full_like(added, tokens + padding)]),
        flat=torch.cat([tree.flat, added]),
        first=torch.cat([tree.first, len(tree.flat) + torch.arange(padding)]),
    )
