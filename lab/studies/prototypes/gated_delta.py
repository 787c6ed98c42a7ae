"""Show that Qwen3-Next's linear attention can be an op whose rows have the same bits in prefill, chunks and decode.

`python -m lab.studies.prototypes.gated_delta` takes a tiny Qwen3-Next of transformers and compares, on what its layers
feed the op: a whole prompt, chunks of 96, single tokens after a prompt, and sequences in one batch, bit for bit; values
and gradients with the recurrence in float64; and the model's logits, with this op in place of transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8rl.numerics.ops.experts import sigmoid

CHUNK = 64
LENGTH, PIECE, PROMPT = 330, 96, 301
"""Tokens of a sequence, of a prefill chunk (no multiple of CHUNK), and those before single ones."""


class Rows(NamedTuple):
    """Tokens of a sequence, FP32. q, k: [H, T, K], normed and q scaled; v: [H, T, V]; g (log decay), beta: [H, T]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def part(self, first: int, last: int) -> Rows:
        return Rows(*(x[:, first:last] for x in self))


@dataclass(frozen=True)
class State:
    """Remains of a sequence, per head, in FP32: the state at the last multiple of CHUNK, and the rows since."""

    whole: Tensor
    """[H, V, K]."""
    keys: Tensor
    """[H, CHUNK, K]."""
    updates: Tensor
    """[H, V, CHUNK]."""
    decay: Tensor
    """[H, CHUNK], the sum of log decays from the multiple to each row. Rows that are not there yet are zero."""
    rows: int = 0
    """How many are there."""

    @classmethod
    def empty(cls, heads: int, key_dim: int, value_dim: int) -> State:
        whole, keys = torch.zeros(heads, value_dim, key_dim), torch.zeros(heads, CHUNK, key_dim)
        return cls(whole, keys, torch.zeros(heads, value_dim, CHUNK), torch.zeros(heads, CHUNK))


def gated_delta(tokens: Rows, state: State) -> tuple[Tensor, State]:
    """The gated delta rule (arXiv 2412.06464) over the next tokens of a sequence: [H, T, V], and the state behind them.

    Chunks begin at multiples of CHUNK of the sequence's own positions. A row reads the state before its chunk and the
    rows of its chunk up to itself, as sums over K and over all CHUNK places, the later ones zero. So a row's result
    depends on no row behind it, and not on how the tokens were handed over. Decays are added up one after the other.
    """
    outputs, first, count = [], 0, tokens.g.shape[1]
    while first < count:
        last = min(count, first + CHUNK - state.rows)
        output, state = _rows_of_chunk(tokens.part(first, last), state)
        outputs.append(output)
        first = last
    return torch.cat(outputs, 1), state


def _rows_of_chunk(tokens: Rows, state: State) -> tuple[Tensor, State]:
    q, k, v, g, beta = tokens
    begin, end = state.rows, state.rows + q.shape[1]
    sums, total = [], state.decay[:, begin - 1] if begin else torch.zeros_like(g[:, 0])
    for one in g.unbind(1):
        total = total + one
        sums.append(total)
    here = torch.stack(sums, 1)
    keys, decay = _placed(state.keys, k, begin, 1), _placed(state.decay, here, begin, 1)
    place = torch.arange(CHUNK)
    before = place[None] < torch.arange(begin, end)[:, None]
    upto = place[None] <= torch.arange(begin, end)[:, None]
    between = here[:, :, None] - decay[:, None]
    mixed = torch.where(before, _rowwise(k, keys) * torch.where(before, between, 0.0).exp(), 0.0)
    fresh = beta[..., None] * (v - here.exp()[..., None] * _rowwise(k, state.whole))
    updates = state.updates
    for row in range(end - begin):  # each reads those before it
        known = (mixed[:, row, None] * updates).sum(-1)
        update = fresh[:, row] - beta[:, row, None] * known
        updates = _placed(updates, update[..., None], begin + row, 2)
    seen = torch.where(upto, _rowwise(q, keys) * torch.where(upto, between, 0.0).exp(), 0.0)
    output = here.exp()[..., None] * _rowwise(q, state.whole) + _rowwise(seen, updates)
    if end < CHUNK:
        return output, State(state.whole, keys, updates, decay, end)
    left = (decay[:, -1:] - decay).exp()
    added = _rowwise(updates * left[:, None], keys.transpose(1, 2))
    whole = decay[:, -1, None, None].exp() * state.whole + added
    return output, replace(State.empty(len(q), k.shape[-1], v.shape[-1]), whole=whole)


def _rowwise(rows: Tensor, others: Tensor) -> Tensor:
    """[H, M, N] from [H, M, K] and [H, N, K]: each element is one sum over K, in an order that only K decides."""
    return (rows[:, :, None] * others[:, None].contiguous()).sum(-1)


def _placed(held: Tensor, rows: Tensor, begin: int, dim: int) -> Tensor:
    before = held.narrow(dim, 0, begin)
    after = held.narrow(dim, begin + rows.shape[dim], held.shape[dim] - begin - rows.shape[dim])
    return torch.cat((before, rows, after), dim)


def causal_conv(x: Tensor, weight: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution before it, with SiLU: x [T, C], weight [C, W], held: the last W - 1 rows before. A row's taps are
    added one after the other, the oldest first."""
    rows, taps = torch.cat((held, x)), weight.shape[1]
    total = rows[: len(x)] * weight[:, 0]
    for tap in range(1, taps):
        total = total + rows[tap : tap + len(x)] * weight[:, tap]
    return silu(total), rows[len(rows) - taps + 1 :]


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), of which torch's own takes another exp for the last few elements of a tensor."""
    return x * sigmoid(x)


def recurrence(tokens: Rows) -> Tensor:
    """The rule as it is defined, token by token, in the precision of what it is given."""
    q, k, v, g, beta = tokens
    whole, outputs = q.new_zeros(len(q), v.shape[-1], k.shape[-1]), []
    for t in range(q.shape[1]):
        whole = whole * g[:, t, None, None].exp()
        update = beta[:, t, None] * (v[:, t] - torch.einsum("hvk,hk->hv", whole, k[:, t]))
        whole = whole + update[..., None] * k[:, t, None]
        outputs.append(torch.einsum("hvk,hk->hv", whole, q[:, t]))
    return torch.stack(outputs, 1)


def main() -> None:
    torch.set_num_threads(1)
    model = tiny_model()
    tokens = torch.randint(0, 128, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs, recorded = _with_rule(model, tokens, None)
        ours, _ = _with_rule(model, tokens, _as_transformers_calls_it)
    print(f"logits of {tokens.numel()} tokens, this op in place of transformers' (FP32): {_worst(ours, theirs)}")
    for layer, batch in enumerate(recorded):
        _compare_op(layer, batch)
    _compare_conv()


def _compare_op(layer: int, batch: list[Rows]) -> None:
    heads, key_dim, value_dim = len(batch[0].q), batch[0].k.shape[-1], batch[0].v.shape[-1]
    empty = State.empty(heads, key_dim, value_dim)
    for sequence, rows in enumerate(batch):
        whole, _ = gated_delta(rows, empty)
        exact, fp32 = recurrence(_doubled(rows)), recurrence(rows)
        print(f"layer {layer}, sequence {sequence}: {LENGTH} tokens, {heads} heads of {key_dim} and {value_dim}")
        cuts = {f"chunks of {PIECE}": [PIECE] * 4, f"{PROMPT}, then single tokens": [PROMPT] + [1] * LENGTH}
        cuts["single tokens"] = [1] * LENGTH
        for name, lengths in cuts.items():
            pieces, state = [], empty
            for piece in _pieces(rows, lengths):
                output, state = gated_delta(piece, state)
                pieces.append(output)
            print(f"  {name}: {_differing(torch.cat(pieces, 1), whole)} of {whole.numel()} differ from one prefill")
        print(f"  transformers' own in chunks of {PIECE}: {_theirs_in_pieces(rows)} differ from its one prefill")
        print(f"  error to float64: {_worst(whole, exact)}; of the recurrence in FP32: {_worst(fp32, exact)}")
        weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2))
        mine = _gradients(lambda rows: gated_delta(rows, empty)[0], rows, weight)
        right = _gradients(recurrence, _doubled(rows), weight.double())
        errors = (float((a - b).norm() / b.norm()) for a, b in zip(mine, right, strict=True))
        print("  gradients of q, k, v, g, beta, error to float64: " + ", ".join(f"{error:.1e}" for error in errors))
    together = Rows(*(torch.cat(parts) for parts in zip(*batch, strict=True)))
    output, _ = gated_delta(together, State.empty(len(batch) * heads, key_dim, value_dim))
    alone = torch.cat([gated_delta(rows, empty)[0] for rows in batch])
    print(f"  {len(batch)} sequences in one batch: {_differing(output, alone)} of {alone.numel()} values differ")


def _compare_conv() -> None:
    draw = torch.Generator().manual_seed(3)
    x, weight = torch.randn(LENGTH, 256, generator=draw), torch.randn(256, 4, generator=draw)
    whole, _ = causal_conv(x, weight, x.new_zeros(3, 256))
    outputs, held = [], x.new_zeros(3, 256)
    for piece in x.split([PIECE, 1, 1, LENGTH - PIECE - 2]):
        output, held = causal_conv(piece, weight, held)
        outputs.append(output)
    reference = torch.nn.functional.conv1d(x.T[None].double(), weight[:, None].double(), padding=3, groups=256)
    exact = torch.nn.functional.silu(reference[0, :, :LENGTH].T)
    differing = _differing(torch.cat(outputs), whole)
    print(f"convolution in pieces: {differing} differ; error to float64: {_worst(whole, exact)}")


def _theirs_in_pieces(rows: Rows) -> int:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule

    def called(rows: Rows, state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (x.transpose(0, 1)[None] for x in rows)
        output, state = rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)
        return output[0], state

    outputs: list[Tensor] = []
    state: Tensor | None = None
    for piece in _pieces(rows, [PIECE] * 4):
        output, state = called(piece, state)
        outputs.append(output)
    return _differing(torch.cat(outputs), called(rows, None)[0])


def _pieces(rows: Rows, lengths: list[int]) -> Iterator[Rows]:
    first = 0
    for length in lengths:
        if first < rows.g.shape[1]:
            yield rows.part(first, first + length)
        first += length


def _doubled(rows: Rows) -> Rows:
    return Rows(*(x.double() for x in rows))


def _gradients(rule: Callable[[Rows], Tensor], rows: Rows, weight: Tensor) -> tuple[Tensor, ...]:
    leaves = Rows(*(x.detach().clone().requires_grad_() for x in rows))
    return torch.autograd.grad((rule(leaves) * weight).sum(), leaves)


def _differing(one: Tensor, other: Tensor) -> int:
    return int((one != other).sum())


def _worst(one: Tensor, other: Tensor) -> str:
    return f"{float((one - other).abs().max()):.1e} at most, of values up to {float(other.abs().max()):.2g}"


def tiny_model() -> Any:
    """Linear attention in three layers of four, as in Qwen3-Next-80B-A3B, with weights that matter."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 64}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2}
    sizes |= {"linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, pad_token_id=0)).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.08)
    return model


def _with_rule(model: Any, tokens: Tensor, rule: Callable[..., Any] | None) -> tuple[Tensor, list[list[Rows]]]:
    """The logits, with `rule` in place of transformers' where one is given, and what each layer's rule was given."""
    found: list[list[Rows]] = []
    modules = [layer.linear_attn for layer in model.model.layers if layer.layer_type == "linear_attention"]
    own = [module.chunk_gated_delta_rule for module in modules]

    def recording(usual: Callable[..., Any]) -> Callable[..., Any]:
        def called(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Any:
            found.append(_inputs(query, key, value, keywords["g"], keywords["beta"]))
            return (rule or usual)(query, key, value, **keywords)

        return called

    try:
        for module, usual in zip(modules, own, strict=True):
            module.chunk_gated_delta_rule = recording(usual)
        return model(tokens, use_cache=False).logits, found
    finally:
        for module, usual in zip(modules, own, strict=True):
            module.chunk_gated_delta_rule = usual


def _as_transformers_calls_it(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> tuple[Tensor, None]:
    batch = _inputs(query, key, value, keywords["g"], keywords["beta"])
    empty = State.empty(query.shape[2], key.shape[-1], value.shape[-1])
    return torch.stack([gated_delta(rows, empty)[0].transpose(0, 1) for rows in batch]), None


def _inputs(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> list[Rows]:
    """The rows of each sequence, heads first, queries and keys normed as transformers norms them."""
    from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

    q, k = l2norm(query, eps=1e-6) / query.shape[-1] ** 0.5, l2norm(key, eps=1e-6)
    return [Rows(*(x.transpose(0, 1).float() for x in each)) for each in zip(q, k, value, g, beta, strict=True)]


if __name__ == "__main__":
    main()
