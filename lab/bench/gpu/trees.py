"""Attention over answers to one prompt, as a prefix tree against packed rows: equal bits, then times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops import TokenTree
from lab.bench.gpu.exactness import HEAD
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch, random


@torch.enable_grad()
def run(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    tree, scale = _answers(*sizes.group, watch.device), HEAD**-0.5
    heads = (sizes.exact.heads, sizes.exact.kv_heads, sizes.exact.kv_heads)
    leaves = [random(len(tree.end), each, HEAD, device=watch.device).requires_grad_() for each in heads]
    in_rows = [leaf.detach()[tree.flat].requires_grad_() for leaf in leaves]
    forward: dict[str, Callable[[], Tensor]] = {
        "tree": lambda: ops.tree_attention(*leaves, tree, scale),
        "packed": lambda: ops.packed_attention(*in_rows, tree.lengths, scale),
    }
    as_tree, packed = (side() for side in forward.values())
    dout = random(*as_tree.shape, device=watch.device)
    backward: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "tree": lambda: torch.autograd.grad(as_tree, leaves, dout, retain_graph=True),
        "packed": lambda: torch.autograd.grad(packed, in_rows, dout[tree.flat], retain_graph=True),
    }
    done.equal("attention over a tree against packed rows, numbers that differ", _differ(as_tree[tree.flat], packed))
    once, again = backward["tree"](), backward["tree"]()
    done.equal("gradients of a tree in two runs, numbers that differ", sum(map(_differ, once, again)))
    sides: dict[str, dict[str, Callable[[], object]]] = {"forward": {**forward}, "backward": {**backward}}
    for name, each in sides.items():
        times = watch.side_by_side(each)
        measured = {f"{side} (us)": seconds * 1e6 for side, seconds in times.items()}
        what = {"attention": name, "tokens of the tree": len(tree.end), "of its rows": len(tree.flat)}
        done.row(what, {**measured, "tree / packed": times["tree"] / times["packed"]})


def _differ(a: Tensor, b: Tensor) -> int:
    return int((a != b).sum())


def _answers(prompt: int, answers: int, tokens: int, device: torch.device) -> TokenTree:
    """The tree of a prompt and answers of so many tokens, no two of which begin alike."""
    from fp8rl.trainer.step.trees import build_tree

    rows = np.tile(np.arange(prompt + tokens), (answers, 1))
    rows[:, prompt:] += tokens * np.arange(answers)[:, None]
    tree, _, _ = build_tree(rows[..., None], [prompt + tokens] * answers)
    return tree.to(device)
