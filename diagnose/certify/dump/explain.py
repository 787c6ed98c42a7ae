"""Explanations of a side that is far from the model: the usual mistakes, each tried on the same tokens.

A mistake is another reading of the log-probabilities (another temperature, the token beside, another beginning), or a
part of the tokens without which nothing is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8rl.diagnose.attribution.compare import TemperatureFit, fit_temperature
from fp8rl.diagnose.certify.dump.reference import Reference, answer, logprobs, untruncated
from fp8rl.diagnose.certify.dump.rows import DumpRow, Sampling
from fp8rl.diagnose.certify.dump.tokens import Tokens, flat
from fp8rl.numerics.sampling import Truncation

KEPT = 1 << 23
"""Logits that are kept to look for a temperature, at most."""
KEPT_TOKENS = 1024
BOS_ROWS = 8
CANDIDATES = [Truncation(top_p=p) for p in (0.7, 0.8, 0.9, 0.95, 0.99)] + [
    Truncation(top_k=k) for k in (10, 20, 40, 50)
]
"""Settings that people use, tried where a dump says none."""
CLEARLY = 0.5
"""A reading that was fitted goes before one that was not if it leaves less than this part of what that leaves."""
UNEXPLAINED = 0.1
"""A mistake is the cause if no more than this part of the difference beyond rounding is left with it made good."""
FAR = 5.0
"""Multiple of our own FP8's distance at which the rounding of a side is taken for that of FP8."""
SAME_TEMPERATURE = 0.02
HARDLY = 1.05
OUTSTANDING = 10.0
"""A part of the tokens stands out if it differs so many times as much as the others."""
LEFT_OUT = 0.01
"""Part of the tokens that may be outside what truncation leaves: at its border, rounding decides."""


@dataclass(frozen=True)
class Explanation:
    """One mistake that would explain a difference."""

    name: str
    """In a word."""
    text: str
    """A clause that follows the side's name."""
    before: float
    """Mean abs(d) on the `tokens` that it was tried on."""
    after: float
    """Likewise, with the mistake made good."""
    tokens: int


@dataclass
class Looks:
    """Other readings of the logits of N rows, taken while they are there; see `Tokens`."""

    rows: Sequence[DumpRow]
    samplings: Sequence[Sampling]
    bos_id: int | None
    earlier: dict[int, Tensor] = field(default_factory=dict)
    """Log-probabilities of the token before each, by row; NaN where there is none."""
    later: dict[int, Tensor] = field(default_factory=dict)
    """Of the token behind each, likewise."""
    plain: dict[int, Tensor] = field(default_factory=dict)
    """Among all tokens, where some are left out."""
    raw: dict[int, Tensor] = field(default_factory=dict)
    """That, at temperature 1."""
    bos: dict[int, Tensor] = field(default_factory=dict)
    """With the text's first token in front, or without it; of some rows."""
    places: list[int] = field(default_factory=list)
    """Of kept tokens, those of `Tokens`."""
    logits: list[Tensor] = field(default_factory=list)
    """Of kept tokens."""
    _seen: int = 0

    def __call__(self, model: Reference, number: int, logits: Tensor) -> None:
        """Look at a row's logits [S - 1, V]."""
        row, sampling = self.rows[number], self.samplings[number]
        tokens, start = answer(row), row.prompt_length - 1
        own = logits[start:]
        nothing = torch.full((1,), math.nan, dtype=torch.float64)
        said = logprobs(own, tokens, sampling)
        before = logprobs(logits[start - 1 : start], torch.tensor([row.tokens[start]]), sampling) if start else nothing
        self.earlier[number] = torch.cat([before, said[:-1]])
        self.later[number] = torch.cat([said[1:], nothing])
        self.plain[number] = untruncated(own, tokens, sampling.divisor) if sampling.truncation.cuts else said
        self.raw[number] = untruncated(own, tokens, 1.0)
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
    tokens: Tokens, said: Tensor, reference: Tensor, looks: Looks, floors: Sequence[Tensor]
) -> tuple[list[Explanation], list[Explanation]]:
    """The mistakes that explain nearly all of what a side has said [N], the likeliest first; and all that were tried,
    those that leave least first.

    Of readings it is the one that leaves least; one that was fitted comes behind those that have nothing to fit, unless
    it leaves clearly less. Parts of the tokens come last.

    reference: the model's own log-probabilities. floors: how far other precisions of the model are from them, BF16
    first.
    """
    plain, fitted = (
        sorted((each for each in found if each), key=lambda each: each.after)
        for found in (_readings(tokens, said, reference, looks), _fitted(tokens, said, reference, looks))
    )
    parts = list(_parts(tokens, (said - reference).abs(), looks.rows))
    tried = sorted(plain + fitted + parts, key=lambda each: each.after / max(each.before, 1e-300))
    rounding = [floor[floor.isfinite()].mean().item() for floor in floors]
    plain, fitted, parts = ([each for each in found if _explains(each, rounding)] for found in (plain, fitted, parts))
    first = bool(plain and fitted) and fitted[0].after < CLEARLY * plain[0].after
    return (fitted + plain if first else plain or fitted) + parts, tried


def _explains(each: Explanation, rounding: Sequence[float]) -> bool:
    """Return whether hardly more than rounding is left: that of BF16, or where the difference is far beyond it, of
    FP8."""
    bf16, *others = rounding
    least = max([bf16, *(other for other in others if each.before >= FAR * other)])
    return each.before > bf16 and each.after - least <= UNEXPLAINED * (each.before - least)


def _readings(tokens: Tokens, said: Tensor, reference: Tensor, looks: Looks) -> Iterator[Explanation | None]:
    rows, before = looks.rows, "its log-probabilities are those of"
    yield _tried("shift", f"{before} the token before each", said, reference, flat(looks.earlier, rows))
    yield _tried("shift", f"{before} the token behind each", said, reference, flat(looks.later, rows))
    if any(each.truncation.cuts for each in looks.samplings):
        text = f"{before} all tokens, not of those that top-p, top-k and min-p leave"
        yield _tried("not renormalised", text, said, reference, flat(looks.plain, rows))
    others = [f"{each:.4g}" for each in tokens.temperature.unique().tolist() if each != 1.0]
    if others:
        text = f"{before} temperature 1, not of {' or '.join(others)}"
        yield _tried("temperature", text, said, reference, flat(looks.raw, rows))
    if looks.bos:
        empty = {number: torch.full((row.answer_length,), math.nan).double() for number, row in enumerate(rows)}
        has = rows[0].tokens[0] == looks.bos_id
        text = f"it has seen texts {'without the' if has else 'with a'} token {looks.bos_id} (BOS) at their beginning"
        yield _tried("BOS", text, said, reference, flat(empty | looks.bos, rows))


def _fitted(tokens: Tokens, said: Tensor, reference: Tensor, looks: Looks) -> Iterator[Explanation | None]:
    """Temperatures, and what leaves tokens out, by the logits that were kept."""
    places = torch.tensor(looks.places)
    logits = torch.stack(looks.logits)
    for temperature in tokens.temperature[places].unique().tolist():
        here = (tokens.temperature[places] == temperature) & said[places].isfinite()
        if not here.any():
            continue
        at, own = places[here], logits[here.to(logits.device)]
        fit = fit_temperature(own, tokens.ids[at].to(own.device), said[at].float().to(own.device))
        best = _written(fit, own, tokens.ids[at], said[at])
        if abs(best / temperature - 1) > SAME_TEMPERATURE:
            text = f"its log-probabilities are those of temperature {best:.4g}, not of {temperature:.4g}"
            fitted = untruncated(own, tokens.ids[at], best)
            yield _tried("temperature", text, said[at], reference[at], fitted)
        if not any(each.truncation.cuts for each in looks.samplings):
            for cut in CANDIDATES:
                named = f"top-p {cut.top_p:g}" if cut.top_p < 1 else f"top-k {cut.top_k}"
                text = f"its log-probabilities are those among the tokens that {named} leaves"
                narrowed = logprobs(own, tokens.ids[at], Sampling(temperature, cut))
                yield _tried("renormalised", text, said[at], reference[at], narrowed)


def _written(fit: TemperatureFit, logits: Tensor, ids: Tensor, said: Tensor) -> float:
    """The temperature as people write it: with one digit or two, if that leaves hardly more."""
    for digits in (1, 2):
        rounded = round(fit.temperature, digits)
        if rounded and (untruncated(logits, ids, rounded) - said).abs().mean() <= HARDLY * fit.abs_diff_mean:
            return rounded
    return fit.temperature


def _tried(name: str, text: str, said: Tensor, reference: Tensor, other: Tensor) -> Explanation | None:
    """Measure what is left with another reading; None where it says nothing of too many tokens."""
    known = said.isfinite() & ~other.isnan()
    if not known.any() or (known & other.isinf()).sum() > LEFT_OUT * known.sum():
        return None
    used = known & other.isfinite() & reference.isfinite()
    if not used.any():
        return None
    before, after = ((said - by)[used].abs().mean().item() for by in (reference, other))
    return Explanation(name, text, before, after, int(used.sum()))


def _parts(tokens: Tokens, abs_d: Tensor, rows: Sequence[DumpRow]) -> Iterator[Explanation]:
    """Parts of the tokens that stand out from all others: special ones, the first of each answer, versions, rows."""
    used = abs_d.isfinite()
    candidates: list[tuple[str, str, Tensor]] = [
        ("special tokens", "special tokens differ, such as the end of an answer", tokens.special),
        ("first token", "the first token of each answer differs", tokens.place == 0),
    ]
    versions = list(dict.fromkeys(tokens.version))
    for version in versions if len(versions) > 1 else ():
        mine = torch.tensor([each == version for each in tokens.version])
        candidates.append(("version", f"tokens of all versions but {version} differ", ~mine))
    candidates += _outstanding_rows(tokens, abs_d, used, len(rows))
    for name, text, part in candidates:
        inside, outside = used & part, used & ~part
        if not inside.any() or not outside.any():
            continue
        before, after = abs_d[used].mean().item(), abs_d[outside].mean().item()
        if abs_d[inside].mean().item() >= OUTSTANDING * after:
            yield Explanation(name, text, before, after, int(used.sum()))


def _outstanding_rows(tokens: Tokens, abs_d: Tensor, used: Tensor, count: int) -> list[tuple[str, str, Tensor]]:
    """The rows that differ far more than the others, if they are a quarter at most."""
    means = row_means(tokens, abs_d, used, count)
    known = means[means.isfinite()]
    if len(known) < 4:
        return []
    rest = known.sort().values[: len(known) - len(known) // 4].mean()
    bad = (means >= OUTSTANDING * rest) & means.isfinite()
    if not bad.any():
        return []
    text = f"{int(bad.sum())} of {len(known)} rows differ, as if they were of other weights or tokens"
    return [("rows", text, bad[tokens.row])]


def row_means(tokens: Tokens, abs_d: Tensor, used: Tensor, count: int) -> Tensor:
    """float64 [rows], mean abs(d) of each; NaN without a finite one."""
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, tokens.row[used], abs_d[used])
    numbers = torch.zeros(count, dtype=torch.float64).index_add_(0, tokens.row[used], abs_d[used] * 0 + 1)
    return sums / numbers
