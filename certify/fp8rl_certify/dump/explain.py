"""Explanations of a side that is far from the model: the usual mistakes, each tried on the same tokens.

A mistake is another reading of the log-probabilities (another temperature, the next token, another beginning), or a
part of the tokens without which no difference remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8rl.diagnose.explain.differences import minimize
from fp8rl.numerics.sampling import Truncation
from fp8rl_certify.dump.floor import OUTLIER, SLOPE, USUAL, Side, floors, mean
from fp8rl_certify.dump.reference import Reference, answer, entropies, logprobs, untruncated
from fp8rl_certify.dump.rows import DumpRow, Sampling
from fp8rl_certify.dump.tokens import Tokens, flat

KEPT = 1 << 23
"""Largest number of logits that are kept to look for a temperature."""
KEPT_TOKENS = 1024
BOS_ROWS = 8
CANDIDATES = [Truncation(top_p=p) for p in (0.7, 0.8, 0.9, 0.95, 0.99)] + [
    Truncation(top_k=k) for k in (10, 20, 40, 50)
]
"""Common truncation settings, tried if a dump says none."""
CLEARLY = 0.5
"""A fitted reading is preferred to a reading without a fit if it leaves less than this fraction of its difference."""
UNEXPLAINED = 0.1
"""A mistake is the cause if without it at most this fraction of the difference beyond rounding remains."""
FAR = 5.0
"""From this multiple of our own FP8's distance on, a side is judged by the rounding of FP8, not of BF16."""
HARDLY = 1.05
OUTSTANDING = 5.0
"""A part of the tokens stands out if its distance is at least this multiple of BF16's distance on the same tokens. For
a row it must also be at least this multiple of the other rows' distance."""
LEFT_OUT = 0.01
"""The fraction of tokens that truncation may leave out although they were sampled: rounding decides at its border."""


@dataclass(frozen=True)
class Explanation:
    """One mistake that would explain a difference."""

    name: str
    """The mistake in a word."""
    text: str
    """A clause that follows the side's name."""
    before: float
    """Mean abs(d) on the `tokens` on which the mistake was tried."""
    after: float
    """Mean abs(d) on the same tokens after the mistake is corrected."""
    tokens: int
    floors_before: float
    """Mean number of floors on these tokens."""
    floors_after: float
    """Mean number of floors on these tokens after the mistake is corrected."""


@dataclass
class Looks:
    """Other readings of the logits of rows, computed while the logits are in memory. Dictionaries are by row."""

    rows: Sequence[DumpRow]
    samplings: Sequence[Sampling]
    bos_id: int | None
    earlier: dict[int, Tensor] = field(default_factory=dict)
    """For each token of an answer, the log-probability of the token before; NaN for the first token."""
    later: dict[int, Tensor] = field(default_factory=dict)
    """For each token of an answer, the log-probability of the token after; NaN for the last token."""
    plain: dict[int, Tensor] = field(default_factory=dict)
    """Log-probabilities without truncation."""
    raw: dict[int, Tensor] = field(default_factory=dict)
    """Log-probabilities without truncation at temperature 1."""
    entropy: dict[int, Tensor] = field(default_factory=dict)
    """Entropy in nats of the distribution that each token was sampled from."""
    bos: dict[int, Tensor] = field(default_factory=dict)
    """For some rows, log-probabilities with the BOS added to the prompt, or removed if the prompt has it."""
    places: list[int] = field(default_factory=list)
    """The index in `Tokens` of each token whose logits are kept."""
    logits: list[Tensor] = field(default_factory=list)
    """The kept logits of each token in `places`."""
    _seen: int = 0

    def __call__(self, model: Reference, number: int, logits: Tensor) -> None:
        """Compute the readings of a row from its logits [S - 1, V]."""
        row, sampling = self.rows[number], self.samplings[number]
        tokens, start = answer(row), row.prompt_length - 1
        own = logits[start:]
        nothing = torch.full((1,), math.nan, dtype=torch.float64)
        said = logprobs(own, tokens, sampling)
        self.earlier[number] = torch.cat([nothing, said[:-1]])
        self.later[number] = torch.cat([said[1:], nothing])
        self.plain[number] = untruncated(own, tokens, sampling.divisor) if sampling.truncation.cuts else said
        self.raw[number] = untruncated(own, tokens, 1.0)
        self.entropy[number] = entropies(own, sampling)
        if self.bos_id is not None and number < BOS_ROWS:
            self.bos[number] = self._with_other_beginning(model, row, sampling)
        self._keep(row, own)

    def _with_other_beginning(self, model: Reference, row: DumpRow, sampling: Sampling) -> Tensor:
        has, long = row.tokens[0] == self.bos_id, row.prompt_length > 1
        if has and not long:
            return torch.full((row.answer_length,), math.nan, dtype=torch.float64)
        other = row.tokens[1:] if has else [self.bos_id or 0, *row.tokens]
        start = row.prompt_length - 2 if has else row.prompt_length
        return logprobs(model.logits(other)[start:], answer(row), sampling)

    def _keep(self, row: DumpRow, own: Tensor) -> None:
        every = max(1, sum(len(each.sampled) for each in self.rows) // self._room(own.shape[-1]))
        for place in row.sampled:
            if self._seen % every == 0 and len(self.places) < self._room(own.shape[-1]):
                self.places.append(self._seen)
                self.logits.append(own[place].clone())
            self._seen += 1

    @staticmethod
    def _room(vocabulary: int) -> int:
        return max(1, min(KEPT_TOKENS, KEPT // vocabulary))


def explanations(
    tokens: Tokens, side: Side, looks: Looks, ours: Sequence[float]
) -> tuple[list[Explanation], list[Explanation]]:
    """Return the mistakes that explain nearly all of a side's difference, the likeliest first, and all mistakes that
    were tried, sorted by the remaining difference. Differences are counted in floors.

    At most one reading is returned: the reading with the smallest remaining difference. A fitted reading must leave
    clearly less than a reading without a fit. Parts of the tokens come last. They are also looked for in a side that is
    within the floor as a whole.

    ours: mean numbers of floors between our own ops and the model.
    """
    plain, fitted = (
        sorted((each for each in found if each), key=lambda each: each.floors_after)
        for found in (_readings(tokens, side, looks), _fitted(tokens, side, looks))
    )
    parts = list(_parts(tokens, side, len(looks.rows)))
    tried = sorted(plain + fitted + parts, key=lambda each: each.floors_after / max(each.floors_before, 1e-300))
    rounding = [max(map(mean, side.floor.of_halves)), *ours]
    plain, fitted = (
        [each for each in found if not side.within and _explains(each, rounding)][:1] for found in (plain, fitted)
    )
    clearly = bool(plain and fitted) and fitted[0].floors_after < CLEARLY * plain[0].floors_after
    return (fitted if clearly else plain or fitted) + parts, tried


def _explains(each: Explanation, rounding: Sequence[float]) -> bool:
    """Return whether hardly more than rounding remains: of BF16 or, if the difference is far larger, of FP8."""
    bf16, *others = rounding
    least = max([bf16, *(other for other in others if each.floors_before >= FAR * other)])
    return each.floors_before > bf16 and each.floors_after - least <= UNEXPLAINED * (each.floors_before - least)


def _readings(tokens: Tokens, side: Side, looks: Looks) -> Iterator[Explanation | None]:
    rows, before = looks.rows, "its log-probabilities are those of"
    yield _tried("shift", f"{before} the token before each", side, flat(looks.earlier, rows))
    yield _tried("shift", f"{before} the token behind each", side, flat(looks.later, rows))
    for base in (2, 10):
        yield _tried("base", f"its logarithms have base {base}, not e", side, side.floor.full / math.log(base))
    if any(each.truncation.cuts for each in looks.samplings):
        text = f"{before} all tokens, not of those that top-p, top-k and min-p leave"
        yield _tried("not renormalised", text, side, flat(looks.plain, rows))
    others = [f"{each:.4g}" for each in tokens.temperature.unique().tolist() if each != 1.0]
    if others:
        text = f"{before} temperature 1, not of {' or '.join(others)}"
        yield _tried("temperature", text, side, flat(looks.raw, rows))
    if looks.bos:
        empty = {number: torch.full((row.answer_length,), math.nan).double() for number, row in enumerate(rows)}
        has = rows[0].tokens[0] == looks.bos_id
        text = f"it has seen texts {'without the' if has else 'with a'} token {looks.bos_id} (BOS) at their beginning"
        yield _tried("BOS", text, side, flat(empty | looks.bos, rows))


def _fitted(tokens: Tokens, side: Side, looks: Looks) -> Iterator[Explanation | None]:
    """Yield readings computed from the kept logits: other temperatures, soft caps and truncations."""
    places, logits = torch.tensor(looks.places), torch.stack(looks.logits)
    sampled_by = [looks.samplings[number] for number in tokens.row[places].tolist()]
    for sampling in dict.fromkeys(sampled_by):
        here = torch.tensor([each == sampling for each in sampled_by]) & side.said[places].isfinite()
        if here.any():
            yield from _by_logits(
                logits[here.to(logits.device)], tokens.ids[places[here]], sampling, side, places[here]
            )


def _by_logits(logits: Tensor, ids: Tensor, sampling: Sampling, side: Side, at: Tensor) -> Iterator[Explanation | None]:
    """Yield readings of logits [M, V] of tokens [M] with the same sampling. at: the tokens' places."""
    before, temperature, top = "its log-probabilities are those", sampling.divisor, logits.abs().max().item()
    known = (side.said[at], side.scale[at])

    def heated(x: float) -> Tensor:
        return logprobs(logits * (temperature / x), ids, sampling)

    def capped(x: float) -> Tensor:
        return logprobs(x * top * (logits / (x * top)).tanh(), ids, sampling)

    fit = _fit(heated, *known)
    if abs(fit / temperature - 1) > SLOPE:
        text = f"{before} of temperature {fit:.4g}, not of {temperature:.4g}"
        yield _tried("temperature", text, side, heated(fit), at)
    fit = _fit(capped, *known)
    text = f"{before} of logits with a soft cap of about {top * fit:.3g}"
    yield _tried("soft cap", text, side, capped(fit), at)
    for cut in () if sampling.truncation.cuts else CANDIDATES:
        named = f"top-p {cut.top_p:g}" if cut.top_p < 1 else f"top-k {cut.top_k}"
        text = f"{before} among the tokens that {named} leaves"
        yield _tried("renormalised", text, side, logprobs(logits, ids, sampling, cut), at)


def _fit(reading: Callable[[float], Tensor], said: Tensor, scale: Tensor) -> float:
    """Return the number for which a reading leaves the smallest difference. It is rounded to one or two decimals if
    this leaves hardly more."""

    def left(x: float) -> float:
        return mean(floors(said, reading(x), scale))

    best = minimize(left)
    rounded = (round(best, digits) for digits in (1, 2))
    return next((each for each in rounded if each and left(each) <= HARDLY * left(best)), best)


def _tried(name: str, text: str, side: Side, other: Tensor, some: Tensor | slice = slice(None)) -> Explanation | None:
    """Measure the remaining difference for another reading of some tokens; None if it leaves out too many of them."""
    said, reference, scale = side.said[some], side.floor.full[some], side.scale[some]
    known = said.isfinite() & ~other.isnan()
    if not known.any() or (known & other.isinf()).sum() > LEFT_OUT * known.sum():
        return None
    used = known & other.isfinite() & reference.isfinite()
    if not used.any():
        return None
    before, after = ((said - by)[used].abs().mean().item() for by in (reference, other))
    from_both = (mean(floors(said, by, scale)[used]) for by in (reference, other))
    return Explanation(name, text, before, after, int(used.sum()), *from_both)


def _parts(tokens: Tokens, side: Side, count: int) -> Iterator[Explanation]:
    """Yield the parts of the tokens that stand out while all other tokens are within the floor: special tokens, first
    tokens, versions, rows."""
    used, floor = side.away.isfinite(), side.floor
    candidates: list[tuple[str, str, Tensor]] = [
        ("special tokens", "special tokens differ, such as the end of an answer", tokens.special),
        ("first token", "the first token of each answer differs", tokens.place == 0),
    ]
    candidates = [each for each in candidates if side.away[each[2]].nanmedian() > 1.0]  # most of them, not a few
    versions = list(dict.fromkeys(tokens.version))
    for version in versions if len(versions) > 1 else ():
        mine = torch.tensor([each == version for each in tokens.version])
        candidates.append(("version", f"tokens of all versions but {version} differ", ~mine))
    candidates += _outstanding_rows(tokens, side, count)
    for name, text, part in candidates:
        inside, outside = used & part, used & ~part
        if not inside.any() or not outside.any():
            continue
        if floor.times(side.away, inside) >= OUTSTANDING and floor.near(side.away, outside):
            before, after = ((side.said - floor.full)[each].abs().mean().item() for each in (used, outside))
            in_floors = (mean(side.away[each]) for each in (used, outside))
            yield Explanation(name, text, before, after, int(used.sum()), *in_floors)


def _outstanding_rows(tokens: Tokens, side: Side, count: int) -> list[tuple[str, str, Tensor]]:
    """Return the rows, at most about a quarter, that differ far more than the other rows and than BF16 does."""
    means, *in_bf16 = (_but_worst(tokens, each, count) for each in (side.away, *side.floor.of_halves))
    rest = means.sort().values[: count - count // 4].mean()
    bad = means >= OUTSTANDING * torch.stack([rest.expand(count), *in_bf16]).amax(0).clamp(min=USUAL)
    if count < 4 or not bad.any():
        return []
    text = f"{int(bad.sum())} of {count} rows differ, as if they were swapped, or of other weights or tokens"
    return [("rows", text, bad[tokens.row])]


def _but_worst(tokens: Tokens, away: Tensor, count: int) -> Tensor:
    """Return float64 [rows]: mean number of floors of each row without its worst token, which rounding may have sent to
    another expert."""
    used, zeros = away.isfinite(), torch.zeros(count, dtype=torch.float64)
    row, values = tokens.row[used], away[used].clamp(max=OUTLIER)
    sums, worst = zeros.index_add(0, row, values), zeros.scatter_reduce(0, row, values, "amax")
    return (sums - worst) / (torch.bincount(row, minlength=count) - 1).clamp(min=1)


def row_means(tokens: Tokens, abs_d: Tensor, used: Tensor, count: int) -> Tensor:
    """Return float64 [rows]: mean abs(d) of each row over used tokens; NaN without any."""
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, tokens.row[used], abs_d[used])
    numbers = torch.zeros(count, dtype=torch.float64).index_add_(0, tokens.row[used], abs_d[used] * 0 + 1)
    return sums / numbers
