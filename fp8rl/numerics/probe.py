"""Checks, when a process starts, that this machine's arithmetic is row-invariant (the start-up probe).

The ops are row-invariant if the arithmetic below them is. A row of a product must not depend on the number of rows, nor
on its place among them, and a sum over keys must not depend on zeros that follow the keys. Neither matrix libraries
nor tensor cores promise this, so each process checks it on the machine at hand before the first rollout. It also checks
that an op in one step gives the bits of the same op in several, because trainer and engine choose differently. A faster
implementation that may change bits is allowed only here, after a comparison.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.backend import dispatch
from fp8rl.numerics.backend.compiler import uncompiled
from fp8rl.numerics.backend.dispatch import AttentionProbe, Probes
from fp8rl.numerics.backend.implementation import capability_of, deepgemm_lacks, has_deepgemm
from fp8rl.numerics.kv import BF16_CACHE, KVFormat
from fp8rl.numerics.ops import ExpertWeights, Fused, HeadNorms, LowRank, NewSlots, TokenTree
from fp8rl.numerics.ops.attention import KEY_CHUNK, KEY_SPLIT
from fp8rl.numerics.ops.experts import adapted_grouped_linear
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.numerics.ops.rope import Yarn
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec

logger = logging.getLogger(__name__)

_MANY = 192
_FEW = (1, 2, 7, 8, 9, 31, 64, 65, 129)
_MICRO_BATCH = 4096
_ATTENTION = AttentionProbe(
    "attention",
    queries=(4, 128),
    keys=(2, 128),
    whole=ops.attention,
    packed=ops.packed_attention,
    paged=ops.paged_attention,
    tree=ops.tree_attention,
)
_OF_EXPERTS = (70, 0, _MANY - 70)
"""Rows of each of three experts."""


def _probes() -> Iterator[Probes]:
    """Yield the trials of ops that only some models have, from our files of ops and from a user's."""
    for file in pkgutil.iter_modules(ops.__path__):
        if (found := getattr(import_module(f"{ops.__name__}.{file.name}"), "PROBES", None)) is not None:
            yield found
    yield from dispatch.USERS_PROBES


def _normal(device: torch.device | str, seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    return random


@uncompiled()  # the bits are the same, and to compile takes longer here than to run
def row_variant_ops(device: torch.device | str = "cpu", kv: KVFormat = BF16_CACHE) -> list[str]:
    """Return the ops that gave a row other bits in a small batch than in a large one, or in one step than in several;
    and the draw, if its kernel draws other tokens than its definition.

    Exact mode works if the list is empty. kv: the format of the engine's cache.
    """
    random = _normal(device, 0)
    x, w, wide = random(_MANY, 512), random(384, 512) / 16, random(384, 512, dtype=torch.float32) / 16
    norm, gate_up, logits = random(512), random(_MANY, 768), random(_MANY, 640) * 4
    spec = QuantSpec.preset("fp8_block_pow2")
    operand = ops.weight_operand(quantize(w, spec.weight))
    stacked = torch.stack((w, -w, w * 2))
    group = ops.weight_operand(quantize(stacked, spec.weight))
    yarn, of_models = Yarn(factor=40.0, original=64, beta_fast=32.0, beta_slow=1.0, mscale=1.0), list(_probes())
    adapter, stacked_adapter = _adapter(random, (), 384, 512), _adapter(random, (3,), 384, 512)
    tokens = torch.arange(_MANY, device=device)
    positions = tokens[:, None]

    def of_experts(n: int, adapter: LowRank | None = None) -> Tensor:
        """Return the results of the second expert's rows, in a call in which the first expert has n rows."""
        counts, weights = torch.tensor([n, _MANY, 0], device=device), ExpertWeights(stacked, group, adapter)
        return adapted_grouped_linear(torch.cat((x[:n], x)), counts, weights, spec, "bf16")[n:]

    rowwise = {
        "bf16 product": lambda n: ops.linear(x[:n], w),
        "fp32 product": lambda n: ops.linear(x[:n].float(), wide),
        "fp8_linear": lambda n: ops.fp8_linear(x[:n], w, operand, spec),
        "adapted bf16 product": lambda n: ops.linear(x[:n], w, 1, ops.low_rank_of(x[:n], adapter)),
        "adapted fp8_linear": lambda n: ops.fp8_linear(x[:n], w, operand, spec, plus=ops.low_rank_of(x[:n], adapter)),
        "rms_norm": lambda n: ops.rms_norm(x[:n], norm, 1e-6),
        "swiglu": lambda n: ops.swiglu(gate_up[:n]),
        "rope": lambda n: ops.rope(x[:n].view(n, 1, 4, 128), positions[:n], 1e6),
        "rope_pairs": lambda n: ops.rope_pairs(x[:n].view(n, 1, 4, 128), positions[:n], 1e6, yarn),
        "route": lambda n: ops.route(logits[:n], 4, True)[0],
        "route_sigmoid": lambda n: ops.route_sigmoid(logits[:n].float(), logits[0].float(), 4, 4, 2, True, 1.5)[0],
        "token_logprobs": lambda n: ops.token_logprobs(logits[:n], tokens[:n], 0.7)[0],
    }
    for probes in of_models:
        rowwise |= probes.rows(random, _MANY)
    attentions = (_ATTENTION, *(probes.attention for probes in of_models if probes.attention is not None))

    def varies(op: Callable[[int], Tensor], other: int) -> bool:
        """Return whether rows have other bits in `op(other)` than in a small batch."""
        rows = op(other)
        return any(not torch.equal(few := op(n), rows[: len(few)]) for n in _FEW)

    with torch.no_grad():
        variant = [name for name, op in rowwise.items() if varies(op, _MANY)]
        if varies(of_experts, 0):
            variant.append("grouped_linear")
        if varies(lambda n: of_experts(n, stacked_adapter), 0):
            variant.append("adapted grouped_linear")
        large = x.repeat(-(-_MICRO_BATCH // _MANY), 1)
        if not torch.equal(ops.linear(large, w)[-_MANY:], ops.linear(x, w)):
            variant.append("bf16 product of a micro-batch")
        if not torch.equal(ops.fp8_linear(large, w, operand, spec)[-_MANY:], ops.fp8_linear(x, w, operand, spec)):
            variant.append("fp8_linear of a micro-batch")
        for newest, keys in ((2 * _MANY, 2 * _MANY), (_MANY, KEY_CHUNK + KEY_SPLIT + 33)):
            for probe in attentions:
                q, k = random(2, newest, *probe.queries), random(2, keys, *probe.keys)
                if not _attention_is_invariant(probe, q, kv.keys(k), kv.dtype):
                    variant.append(f"{probe.name} over {keys} keys")
        drawn = (random(16, 9000) * 4, torch.full((16,), 0.7, device=device), tokens[:16], tokens[:16])
        if not torch.equal(ops.draw(*drawn), dispatch.OPS["draw"](*drawn)):  # the kernel bounds the FP64 sums
            variant.append("draw, whose tokens differ from its definition's")
        variant += [name for name, (one, several) in _forms(random, spec).items() if not torch.equal(one, several)]
    return variant


def choose_tiles(device: torch.device | str) -> dict[str, bool]:
    """Allow tiles of 64 for few rows and tiles of 256 for many BF16 columns. Return which of the two are allowed.

    A size is allowed if kernels run and this machine computes the same bits in it as in tiles of 128. Every process
    decides for itself, before its first CUDA graph: processes may use different tiles, but their bits are equal.
    """
    trials = {"of 64 rows": _of_few_rows, "of 256 columns": _of_many_columns}
    equal = dict.fromkeys(trials, False)
    if dispatch.installed() is None:
        return equal
    from fp8rl.numerics.kernels.products.tiles import ALLOWED, SHORT, WIDE

    for size, (sizes, results) in zip((SHORT, WIDE), trials.items(), strict=True):
        ALLOWED[size] = False
        before = results(device)
        ALLOWED[size] = True
        equal[sizes] = all(torch.equal(a, b) for a, b in zip(before, results(device), strict=True))
        ALLOWED[size] = equal[sizes]
        if not equal[sizes]:
            logger.warning(
                f"numerics: found other bits with tiles {sizes} than with tiles of 128, expected equal bits. Tiles of "
                "128 are used, which is slower and changes no result"
            )
    return equal


def allow_deepgemm(device: torch.device | str) -> str | None:
    """Let FP8 products run on DeepGEMM if our kernels run here and DeepGEMM gives their bits. Return why not, or None.

    Every process decides for itself, before its first CUDA graph.
    """
    if lacking := deepgemm_lacks(capability_of(device), has_deepgemm()):
        return f"no {lacking}"
    if dispatch.installed() is None:
        return "no kernels for the spec, so its products cannot be compared"
    from fp8rl.numerics.kernels.products import deepgemm

    deepgemm.allow(None)
    ours = _products(device)
    try:
        deepgemm.allow(deepgemm.installed())
        theirs = _products(device)
    # Of whatever class: it compiles as it is called, and our kernels have the same results.
    except Exception as error:
        deepgemm.allow(None)
        return f"DeepGEMM fails with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}"
    if different := [name for name, bits in ours.items() if not torch.equal(bits, theirs[name])]:
        deepgemm.allow(None)
        return f"other bits than those of the Triton kernel, in {', '.join(different)}"
    return None


def choose_deepgemm(device: torch.device | str, wanted: bool | None) -> str | None:
    """Let FP8 products run on DeepGEMM if they can, unless `wanted` is False. If it is True, return why they cannot."""
    obstacle = None if wanted is False else allow_deepgemm(device)
    return obstacle if wanted else None


_DENSE = ((1, 384, 512), (65, 192, 2048), (130, 4096, 256), (192, 2048, 768), (4096, 1536, 2048))
"""Rows, N and K of the products by which DeepGEMM is compared: ragged and whole tiles, narrow and wide ones."""
_GROUPED = ((300, 0, 213), 384, 512)
"""Rows of each expert, N and K of the grouped product by which DeepGEMM is compared."""


@torch.no_grad()
def _products(device: torch.device | str) -> dict[str, Tensor]:
    from fp8rl.numerics.kernels.products.gemm import gemm
    from fp8rl.numerics.kernels.products.tiles import make_tiles

    generator, found = torch.Generator().manual_seed(2), {}

    def random(*shape: int) -> Tensor:
        """Return normal numbers, each row times a random power of two."""
        sizes = torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1), generator=generator))
        return (torch.randn(*shape, generator=generator) * sizes).to(device=device, dtype=torch.bfloat16)

    counts, wide, deep = _GROUPED
    rows, matrices = random(sum(counts), deep), random(len(counts), wide, deep)
    dense = [(random(m, k), random(n, k)) for m, n, k in _DENSE]
    for preset in ("fp8_block_pow2", "fp8_block_fp32"):
        spec = QuantSpec.preset(preset)
        for (x, w), (m, n, k) in zip(dense, _DENSE, strict=True):
            a, b = quantize(x, spec.activation), quantize(w, spec.weight)
            found[f"{m} x {n} x {k} in {preset}"] = gemm(a, b, torch.bfloat16)
        tiles = make_tiles(torch.tensor(counts, device=rows.device), len(rows))
        a, b = quantize(rows, spec.activation), quantize(matrices, spec.weight)
        found[f"experts in {preset}"] = gemm(a, b, torch.bfloat16, tiles=tiles)
    return found


@torch.no_grad()
def _of_few_rows(device: torch.device | str) -> list[Tensor]:
    """Return FP8 products, experts and decode attention of few rows, which may run in short tiles."""
    random, spec = _normal(device, 1), QuantSpec.preset("fp8_block_pow2")
    x, weight = random(64, 256), random(128, 256) / 16
    operand = ops.weight_operand(quantize(weight, spec.weight))
    found = [ops.fp8_linear(x[:n], weight, operand, spec, k_splits=k) for n, k in ((64, 1), (9, 1), (64, 2))]
    first, second = (random(3, *shape) / 16 for shape in ((256, 256), (256, 128)))
    w13, w2 = (ExpertWeights(stack, ops.weight_operand(quantize(stack, spec.weight))) for stack in (first, second))
    found.append(ops.experts(x, torch.tensor([40, 0, 24], device=x.device), w13, w2, spec))
    keys, values, each = random(4000, 2, 128), random(4000, 2, 128), torch.arange(3, device=x.device)
    for longest in (300, KEY_CHUNK + 100):
        lengths = torch.tensor([longest, 1, 129], device=x.device)
        table = torch.arange(3 * longest, device=x.device, dtype=torch.int32).view(3, longest).flip(1)
        found.append(ops.paged_attention(random(3, 16, 128), keys, values, table, each, each // 4 + 1, lengths, 0.1))
    return found


@torch.no_grad()
def _of_many_columns(device: torch.device | str) -> list[Tensor]:
    """Return BF16 products that may run in wide tiles: whole ones, and one with a ragged end."""
    random = _normal(device, 3)
    x = random(130, 192)
    return [ops.linear(x, random(n, 192)) for n in (2048, 2100)]


def _forms(random: Callable[..., Tensor], spec: QuantSpec) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the result of each op in one step, and its result in several steps. The two must be equal."""
    x, residual, norm, w = random(_MANY, 512), random(_MANY, 512), random(512), random(384, 512) / 16
    first, second = (random(3, *shape) / 16 for shape in ((384, 512), (512, 192)))
    counts = torch.tensor(_OF_EXPERTS, device=x.device)

    def operand(weight: Tensor) -> Any:
        return ops.weight_operand(quantize(weight, spec.weight))

    def product(x: Tensor, slices: int = 1) -> Tensor:
        return ops.fp8_linear(x, w, operand(w), spec, k_splits=slices)

    def of_experts(x: Tensor, weight: Tensor) -> Tensor:
        return grouped_linear(x, counts, weight, operand(weight), spec)

    halves = list(zip(x.chunk(2, 1), w.chunk(2, 1), strict=True))
    bf16_partials = [ops.linear_partial(a, b) for a, b in halves]
    fp8_partials = [ops.fp8_linear_partial(a, b, operand(b), spec) for a, b in halves]
    w13, w2 = (ExpertWeights(weight, operand(weight)) for weight in (first, second))
    experts = ops.experts(x, counts, w13, w2, spec)
    forms = {
        "add_rms_norm": (ops.add_rms_norm(x, residual, norm, 1e-6)[0], ops.rms_norm(x + residual, norm, 1e-6)),
        "norm_fp8_linear": (
            ops.norm_fp8_linear(x, norm, 1e-6, w, operand(w), spec),
            product(ops.rms_norm(x, norm, 1e-6)),
        ),
        "experts": (experts, of_experts(ops.swiglu(of_experts(x, first)), second)),
        "bf16 product in slices": (ops.linear(x, w, 2), ops.merge_partials(bf16_partials, x.dtype)),
        "fp8_linear in slices": (product(x, 2), ops.merge_partials(fp8_partials, x.dtype)),
    }
    return forms | _adapted_forms(random, x, w, counts) | _fused_forms(random, w13, w2, spec)


def _fused_forms(
    random: Callable[..., Tensor], w13: ExpertWeights, w2: ExpertWeights, spec: QuantSpec
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `_forms` of the ops that an engine may compute in one kernel or in several. w13 is [3, 384, 512]."""
    x, residual, norm, heads = random(_MANY, 512), random(_MANY, 512), random(512), random(_MANY, 8, 128)
    normed, total, rows = ops.norm_rows(x, residual, norm, 1e-6, spec.activation)
    separate = ops.add_rms_norm(x, residual, norm, 1e-6)
    first = ops.weight_operand(quantize(w13.weights[0], spec.weight))
    product = ops.fp8_linear(separate[0], w13.weights[0], first, spec)
    probs, chosen = ops.route(random(_MANY, 3, dtype=torch.float32), 2, True)
    routed = dispatch.OPS["routed_experts"](separate[0], probs, chosen, w13, w2, spec, "bf16")

    q, k, v = heads.split((4, 2, 2), 1)
    norms, token = HeadNorms(random(128), random(128), 1e-6), torch.arange(_MANY, device=x.device)
    cache = NewSlots(torch.zeros_like(k), torch.zeros_like(v), token.flip(0), v)
    turned = ops.rope_heads(q, k, token, 1e6, norms=norms, cache=cache)
    weighted = ((q, norms.queries), (k, norms.keys))
    parts = [ops.rope(ops.rms_norm(head, weight, 1e-6)[None], token[None], 1e6)[0] for head, weight in weighted]
    return {
        "norm_rows": (torch.cat((normed, total)), torch.cat(separate)),
        "rows_linear": (ops.rows_linear(rows, first, x.dtype), product),
        "rope_heads": (torch.cat(turned, 1), torch.cat(parts, 1)),
        "rope_heads into a cache": (torch.cat((cache.keys, cache.values), 1), torch.cat((parts[1], v), 1).flip(0)),
        "routed_experts": (ops.routed_experts(normed, probs, chosen, w13, w2, spec, "bf16", rows), routed),
    }


def _adapter(random: Callable[..., Tensor], experts: tuple[int, ...], n: int, k: int) -> LowRank:
    """Return an adapter of a product that fuses two matrices, whose rows alternate in blocks of 64."""
    rows, rank = torch.arange(n), 8
    fused = Fused.of(rows, rows // 64 % 2, n, 2, rank)
    a, b = random(*experts, 2 * rank, k) / 16, random(*experts, n, rank)
    return LowRank(a, fused.to(b.device).wide(b), 0.5, 2)


def _adapted_forms(
    random: Callable[..., Tensor], x: Tensor, w: Tensor, counts: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return pairs of results that must be equal: an adapted product whole and in slices of K, in two orders of the
    weight's rows, and the experts' adapter terms together and one by one."""
    adapter, of_each = _adapter(random, (), *w.shape), _adapter(random, (3,), *w.shape)
    halves = zip(*(fused.chunk(2, 1) for fused in (x, w, adapter.a)), strict=True)
    sums = [(ops.linear_partial(part, of_w), ops.linear_partial(part, of_a)) for part, of_w, of_a in halves]
    h = ops.merge_partials([of_a for _, of_a in sums], x.dtype)
    term = ops.low_rank_term(h, adapter.b, adapter.scale, adapter.parts)
    merged = ops.merge_partials([of_w for of_w, _ in sums], x.dtype, term)
    order = torch.arange(len(w), device=w.device).flip(0)
    turned = LowRank(adapter.a, adapter.b[order], adapter.scale, adapter.parts)
    terms = ops.grouped_low_rank_term(h, counts, of_each.b, of_each.scale, of_each.parts)
    alone = [
        ops.low_rank_term(rows, b, of_each.scale, of_each.parts)
        for rows, b in zip(h.split(_OF_EXPERTS), of_each.b, strict=True)
    ]
    return {
        "adapted product in slices": (ops.linear(x, w, 2, ops.low_rank_of(x, adapter, 2)), merged),
        "adapted product of other rows": (
            ops.linear(x, w, 1, ops.low_rank_of(x, adapter))[:, order],
            ops.linear(x, w[order], 1, ops.low_rank_of(x, turned)),
        ),
        "terms of experts": (terms, torch.cat(alone)),
    }


def _attention_is_invariant(probe: AttentionProbe, q: Tensor, kv: Tensor, kept: torch.dtype) -> bool:
    """Return whether attention gives q, the newest tokens of two sequences, the same bits in other batches.

    The other batches are: single queries with only the keys that they see; the paged op; and, if q holds all tokens,
    the packed op and a tree of both sequences with a common beginning. kept: the dtype of the cache.
    """
    length = kv.shape[1]
    oldest, common = length - q.shape[1], KEY_SPLIT + 33
    if not oldest:
        q, kv = q.clone(), kv.clone()
        q[1, :common], kv[1, :common] = q[0, :common], kv[0, :common]
    positions = torch.arange(oldest, length, device=q.device).expand(q.shape[0], -1)
    whole = probe.attend(probe.whole, q, kv, positions)
    # Slot 0 of the cache is nobody's; sequence b's keys lie backwards in the rest.
    slots = 1 + torch.arange(2 * length, device=q.device).flip(0).view(2, length)
    cache = kv.new_full((1 + 2 * length, *kv.shape[2:]), torch.nan)
    cache[slots] = kv
    cache = cache.to(kept)
    both = torch.arange(2, device=q.device)

    def paged(first: int, stop: int) -> Tensor:
        """Return paged attention of queries `first` to `stop` - 1 of both sequences, as if they were the last ones."""
        new, lengths = (torch.full((2,), count, device=q.device) for count in (stop - first, stop))
        fresh = q[:, first - oldest : stop - oldest].flatten(0, 1)
        return probe.attend(probe.paged, fresh, cache, slots, both, new, lengths).unflatten(0, (2, -1))

    if not oldest:
        lengths = torch.tensor([length, length - 100], device=q.device)
        queries, keys, expected = (torch.cat([x[0], x[1, : length - 100]]) for x in (q, kv, whole))
        if not torch.equal(probe.attend(probe.packed, queries, keys, lengths), expected):
            return False
        queries, keys, expected = (torch.cat([x[0], x[1, common:]]) for x in (q, kv, whole))
        tree = _of_two(length, common, q.device)
        if probe.tree is not None and not torch.equal(probe.attend(probe.tree, queries, keys, tree), expected):
            return False
    ends = (0, 5, 31, 32, 96, KEY_SPLIT - 1, KEY_SPLIT, KEY_SPLIT + 33, 2 * KEY_SPLIT + 1, KEY_CHUNK - 1, KEY_CHUNK)
    return torch.equal(paged(oldest, length), whole) and all(
        torch.equal(
            probe.attend(probe.whole, q[:1, i : i + 1], kv[:1, : t + 1], positions[:1, i : i + 1]), whole[:1, i : i + 1]
        )
        and torch.equal(paged(t, t + 1), whole[:, i : i + 1])
        for t in (*ends, length - 1)
        if 0 <= (i := t - oldest) < q.shape[1]
    )


def _of_two(length: int, common: int, device: torch.device) -> TokenTree:
    """Return the tree of two rows of `length` tokens whose first `common` tokens are the same."""
    tokens = 2 * length - common
    first = torch.arange(length, device=device)
    second = torch.cat((first[:common], torch.arange(length, tokens, device=device)))
    end = torch.full((tokens,), tokens, device=device)
    end[common:length] = length
    return TokenTree(
        new=torch.tensor([length, length - common], device=device),
        lengths=torch.tensor([length, length], device=device),
        table=torch.stack((first, second)).int(),
        end=end,
        flat=torch.cat((first, second)),
        first=torch.cat((first, length + torch.arange(common, length, device=device))),
    )
