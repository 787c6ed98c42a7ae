"""The reward `math`: an answer whose last expression math-verify finds equal to the reference."""

from __future__ import annotations

import logging
import re
import unicodedata
from itertools import product
from typing import Any

from fp8rl.rollout.rewards.builtin import final_integer

# Texts as math-verify reads them: without Markdown, currency, and separators of digits.
#
# Each rule looks at what stands beside, so that mathematics stays: `2**3` is a power, `a_1` an index, `$x$` is math.

_NUMBER = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_BEFORE, _AFTER = r"(?<![\w)\]}*\\$])", r"(?![\w*$])"
_UNIT = r"(?:[mck]?m|ft|in|yd|mi|k?g|lb|s|sec|min|h|hr|day|yr)(?:\^(?:\d|\{-?\d\})|[²³])?"

_RULES = [
    # Signs that LaTeX writes otherwise.
    (r"[−–](?=[\d.$\\])", "-"),
    (r"[×⋅·](?=\s*[\d(])", "*"),
    (r"÷", "/"),
    (r"∞", r"\\infty "),
    (r"\\varnothing|∅", r"\\emptyset "),
    (r"(\^\{?\\circ\}?|°)\s*[CF]\b", r"\1"),
    (r"√\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+(?:\.\d+)?|[a-zA-Z]))", r"\\sqrt{\1\2\3}"),
    # Units that math-verify would take for variables: it knows single ones alone.
    (rf"(?<=\d)\s+{_UNIT}(?:\s*/\s*{_UNIT})*(?=\s*(?:[.,]?\s*$|\}}|\\?\$))", ""),
    # Markdown: code, bold and italic; and the same as HTML.
    (r"`+", " "),
    (rf"{_BEFORE}(\*{{1,3}})(?=[^\s*])([^*\n]*[^\s*\\])\1{_AFTER}", r"\2"),
    (rf"{_BEFORE}(_{{1,3}})(?=[^\s_{{])([^_\n]*[^\s_\\])\1{_AFTER}", r"\2"),
    (r"<(b|strong|i|em|code|u)>([^<>\n]*)</\1>", r"\2"),
    # A command for bold letters that math-verify does not know.
    (r"\\(?:boldsymbol|bm|pmb)(?=\s*\{)", r"\\mathbf"),
    # Currency. A dollar that is not escaped may begin math: only behind a minus and before a lone number it does not.
    (r"(?:\bUS)?\\\$\s*", ""),
    (rf"(?<![\w$\\}})])-\$(?={_NUMBER}(?![\d$]))", "-"),
    (r"[€£¥₹₽₩]\s*(?=-?[\d.])|(?<=\d)\s*[€£¥₹₽₩]", ""),
    (r"(?<=\d)\s+(?:dollars?|cents?|euros?|USD|EUR)\b", ""),
    # Separators of thousands.
    (r"(?<=\d),(?=\d{3}\s*\\?%)", ""),
    (r"(?<=\d)(?:\\[,!;: ]|\{,\}|~|[\u00a0\u2009\u202f'’])(?=\d{3}(?!\d))", ""),
]
_COMPILED = [(re.compile(pattern), to) for pattern, to in _RULES]
_SPACED = re.compile(r"(?<![\w.,])(\d{1,3}(?: \d{3})+)(?![\w,])")
_EXPONENT = re.compile(
    r"(?<![\w.])(?:(\d+\.\d+)[eE]\+?(-?\d+)|(\d+)[eE]\+?(-?\d{2,}))(?!\w|\.\d)(?:\.(?=\s|$))?"
    r"|(?<=[\d)\]}xyzn])([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)(?:\.(?=\s|$))?"
)

# Decimals with a cycle, and whole numbers with a fraction: math-verify would drop the cycle, and read 3 1/2 as (3+1)/2.
# Numbers of more than 30 digits stay: Python refuses to read very long ones.

_WHOLE = r"(?<![\w.])(?<!\d,)(?P<whole>\d{1,3}(?:,\d{3}){1,9}|\d{1,30})"
_DOT = r"\\dot\s*(?:\{\d{1,30}\}|\d)"
_CYCLE = re.compile(
    rf"(?:{_WHOLE}|(?<!\w))\.(?P<fixed>\d{{0,30}})"
    rf"(?P<cycle>\\(?:overline|bar)\s*(?:\{{\s*\d{{1,30}}\s*\}}|\d)|{_DOT}(?:\d{{0,30}}{_DOT})?)(?!\d)"
)
_PROPER = r"(?:\{(?P<top>\d{1,30})\}\s*\{(?P<bottom>\d{1,30})\}|(?P<pair>\d\d))"
_MIXED = re.compile(
    rf"(?<![/^)\]])(?<!\\sqrt ){_WHOLE}(?:"
    r"(?:[ \u00a0\u2009\u202f~]|\\[ ,;:])+(?P<over>\d{1,30})/(?P<under>\d{1,30})(?![\w/]|\.\d)"
    # A letter behind it makes it a product.
    rf"|(?:\s|~|\\[ ,;:!])*\\[dt]?frac\s*{_PROPER}(?![\w(^{{]|\\(?!%)|\s+[a-z]\b))"
)
_ONE_SIGN = re.compile(rf"(?:{_WHOLE}\s?)?(?P<sign>[¼-¾⅐-⅞])")


def plain(text: str) -> str:
    """Return a text with its expressions as they are, without the markup around and within them, and with its numbers
    as math-verify reads them."""
    for pattern, to in _COMPILED:
        text = pattern.sub(to, text)
    text = _SPACED.sub(lambda found: found[1].replace(" ", ""), text)
    text = _CYCLE.sub(_repeating, text)
    text = _ONE_SIGN.sub(_sign, text)
    text = _MIXED.sub(_improper, text)
    return _EXPONENT.sub(_power, text)


def _repeating(found: re.Match[str]) -> str:
    """The fraction that a decimal with a cycle of digits is: 2.1 and a cycle of 6 are (216 - 21) / 90."""
    fixed, cycle = found["fixed"], re.sub(r"\D", "", found["cycle"])
    before = int((found["whole"] or "0").replace(",", "") + fixed)
    over = int(f"{before}{cycle}") - before
    return rf"\frac{{{over}}}{{{(10 ** len(cycle) - 1) * 10 ** len(fixed)}}}"


def _improper(found: re.Match[str]) -> str:
    """The fraction that a whole number and a proper fraction are."""
    pair = found["pair"] or "00"
    over, under = int(found["over"] or found["top"] or pair[0]), int(found["under"] or found["bottom"] or pair[1])
    return _sum(found["whole"], over, under) if over < under else found[0]


def _sign(found: re.Match[str]) -> str:
    """The fraction that one character is, such as ½, with the whole number before it."""
    over, under = unicodedata.normalize("NFKC", found["sign"]).split("\u2044")
    return _sum(found["whole"] or "0", int(over), int(under))


def _sum(whole: str, over: int, under: int) -> str:
    return rf"\frac{{{int(whole.replace(',', '')) * under + over}}}{{{under}}}"


def _power(found: re.Match[str]) -> str:
    """A power of ten, as both LaTeX and a line of text may have it."""
    if found[5]:
        return f"^({found[5].translate(_SUPERSCRIPTS)})"
    return f"{found[1] or found[3]}*10^({found[2] or found[4]})"


_BOX = r"\boxed{"
_LONGEST = 200
"""Characters of a result without dollars: a text of thousands, which is none, would take math-verify a minute."""
_DIGITS = 50
"""Digits to which what is no fraction is computed to be compared."""


def math(answer: str, reference: str, finished: bool) -> float:
    """Return 1 if the model ended the answer and its last expression equals the reference's result, else 0.

    The result stands after `####`, if there is one. Of several `\\boxed{}` the last counts, or those that stand close
    together as one set. An answer that breaks math-verify is wrong.

    Raises:
        ValueError: `reference` holds no expression that math-verify can read.
    """
    if not finished:
        return 0.0
    answer = plain(answer)
    gold = final_integer(reference)
    if gold is not None and final_integer(answer) == gold:
        return 1.0
    from math_verify import parse

    reference_text = plain(reference)
    marked = _marked(reference_text)
    result = reference_text if marked is None else marked
    # The caller's deadline replaces math-verify's own.
    expected = _read(result) or parse(result, parsing_timeout=None)
    if not expected:
        raise ValueError(f"found {reference!r}, expected a reference with an expression that math-verify can read")
    own = parse(answer, parsing_timeout=None)
    marked = _marked(answer) or ""
    if 0 < len(marked) <= _LONGEST and not any(sign in marked for sign in ("$", "\\(", "\\[", _BOX)):
        own += _read(marked)  # as a reference is read: an interval needs no $ there
    if answer.count(_BOX) > 1:
        own += parse(answer[answer.rindex(_BOX) :], parsing_timeout=None)
    return float(any(_compared(*pair) for pair in product(expected, own)))


def _read(result: str) -> list[Any]:
    """Return what math-verify makes of a text that is mathematics as a whole; of some, such as a fraction in percent,
    it makes an expression only in a box."""
    from math_verify import parse

    found: list[Any] = parse(f"${result}$", parsing_timeout=None)
    if all(isinstance(each, str) for each in found):
        found += parse(f"{_BOX}{result}}}", parsing_timeout=None)
    return found


def _marked(text: str) -> str | None:
    """Return the result that stands after the last `####`, in one line; None: there is no `####`."""
    _, marker, tail = text.rpartition("####")
    return tail.strip().partition("\n")[0].rstrip(". ") if marker else None


def _compared(gold: Any, own: Any) -> bool:
    from sympy import nan, zoo

    try:
        # What is written alike needs no arithmetic, which of 10^{10^{10}} would take for ever.
        return bool(gold == own and gold not in (nan, zoo)) or _equal(_exact(gold), _exact(own))
    except Exception:  # sympy raises nearly anything on adversarial text, and such an answer is wrong
        return False


def _exact(value: Any) -> Any:
    """Return an expression with its decimals as fractions, and the rational numbers in it computed.

    math-verify rounds floats to six decimals, by which 1.6e-19 is 9.1e-31.
    """
    from sympy import Basic, Float, MatrixBase, Mul, Rational, UnevaluatedExpr
    from sympy.core.relational import Relational

    if isinstance(value, Float):
        return Rational(str(value))
    if isinstance(value, MatrixBase):
        return value.applyfunc(_exact)
    if not isinstance(value, Basic) or not value.args:
        return value
    if (percent := _percent(value)) is not None:
        return Mul(_exact(percent), UnevaluatedExpr(Rational(1, 100)), evaluate=False)
    before = getattr(value, "_unsorted_args", value.args)
    after = [_exact(part) for part in before]
    if any(old is not new for old, new in zip(before, after, strict=True)):  # else a product loses the order of a word
        value = value.func(*after, evaluate=False) if isinstance(value, Relational) else value.func(*after)
    if value.is_number and (computed := value.doit()).is_Rational:
        return computed
    return value


def _percent(value: Any) -> Any:
    """Return N of N percent; None: it is no percentage. A minus is a factor of its own in what math-verify makes."""
    from sympy import Mul, Rational, UnevaluatedExpr

    hundredth = UnevaluatedExpr(Rational(1, 100))
    if not isinstance(value, Mul) or value.args.count(hundredth) != 1:
        return None
    return Mul(*(part for part in value.args if part != hundredth))


def _equal(gold: Any, own: Any) -> bool:
    """Compare two expressions: numbers by their exact values, all else by math-verify."""
    from math_verify import verify

    if not (getattr(gold, "is_number", False) and getattr(own, "is_number", False)):
        return bool(verify(gold, own, numeric_precision=_DIGITS, allow_set_relation_comp=True, timeout_seconds=None))
    shares = [_percent(gold), _percent(own)]
    if (shares[0] is None) == (shares[1] is None):
        return _same_number(gold, own)
    # 25% is right for 0.25, and for 25 in an answer that leaves the sign out, or adds it.
    return _same_number(gold, own) or _same_number(*(n if s is None else s for n, s in zip((gold, own), shares)))


def _same_number(one: Any, other: Any) -> bool:
    """Compare two numbers, however large or small they are."""
    from sympy import nan, simplify, zoo

    one, other = one.doit(), other.doit()
    if one == other:
        return one not in (nan, zoo)
    if (one.is_Rational and other.is_Rational) or not (one.is_finite and other.is_finite):
        return False
    difference = one - other if one.is_zero or other.is_zero else one / other - 1
    return bool(difference.evalf(_DIGITS, chop=True) == 0 or simplify(difference).is_zero)


def prepare() -> None:
    """Do the work on which the first comparison of a process spends seconds."""
    logging.disable(logging.CRITICAL)
    math("$\\frac{1}{2}$", "0.5", finished=True)
