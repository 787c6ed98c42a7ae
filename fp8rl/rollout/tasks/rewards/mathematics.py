"""The reward function `math`, which compares the last statement of an answer with the reference by math-verify."""

from __future__ import annotations

import logging
import os
import re
import resource
from dataclasses import replace
from functools import lru_cache
from itertools import count, product
from typing import Any
from unicodedata import normalize

# Texts as math-verify reads them: without Markdown, currency, and separators of digits.
#
# Each rule looks at what stands beside, so that mathematics stays: `2**3` is a power, `a_1` an index, `$x$` is math.

_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_BEFORE, _AFTER = r"(?<![\w)\]}*\\$])", r"(?![\w*$])"
_UNIT = (
    r"(?:[mck]?m|m?[lL]|ft|in|yd|mi|k?g|lb|s|sec|min|h|hr|day|yr|rad|mph|[kMG]?(?:Hz|Pa|eV|Wh)|m?mol|k[JNVW]|m[AV])"
    r"(?:\^(?:\d|\{-?\d\})|[²³])?"
)

_RULES = [
    # Signs for which LaTeX has another form.
    (r"(?:[−–‐‑﹣]|\b(?:minus|negative)[ \t]+(?!\\?\$-))(?=[\d.$\\])", "-"),
    (r"≈|~=", r"\\approx "),
    (r"\s*(?:°|\\degree(?![A-Za-z]))", r"^{\\circ}"),
    (r"(?<![\\A-Za-z{])(pi|sin|cos|tan|log|ln|exp)(?![A-Za-z])", r"\\\1 "),
    (r"(?<![\\A-Za-z])sqrt(?=\s*[({\d])", "√"),
    (r"(?<=[\d}])\s*(?:percent|pct)\b", r"\\%"),
    (r"(?:[×⋅·]|(?<=\d) ?x(?= ?10\s?(?:\^|\*\*)))(?=\s*[\d(])", "*"),
    (r"[÷⁄∕]", "/"),
    (r"∞", r"\\infty "),
    (r"\\varnothing|∅", r"\\emptyset "),
    (r"(\^\{?\\circ\}?|°)\s*[CF]\b", r"\1"),
    (r"√\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+(?:\.\d+)?|[a-zA-Z]))", r"\\sqrt{\1\2\3}"),
    (r"(\.\d{0,30}?)(\d{1,30}?)\2{2,30}(?:\.{3}|…|\\[cl]?dots(?![A-Za-z]))", r"\1\\overline{\2}"),
    # Separators of thousands.
    (r"(?<=\d),(?=\d{3}\s*\\?%)", ""),
    (r"(?<=\d)(?:\\[,!;: ]|(?:\\(?:text|mathord))?\{,\}|[~_]|[\u00a0\u2009\u202f'’])(?=\d{3}(?!\d))", ""),
    # Blanks of LaTeX and Unicode. A negative one joins what is beside it.
    (r"(?<!\\)\\!", ""),
    (r"(?<!\\)(?:~|\\[,:; ]|\\(?:thin|med|thick|en)space(?![A-Za-z]))|[\u00a0\u2000-\u200a\u202f\u3000]", " "),
    # Units that math-verify would take for variables. It knows only single units.
    (rf"(?<=\d)\s+{_UNIT}(?:\s*/\s*{_UNIT})*(?=\s*(?:[.,]?\s*$|\}}|\\?\$))", ""),
    # Two that are letters of formulas: only a result is a number alone.
    (r"((?:boxed\s*\{|^)\s*-?\d[\d.,]*)\s*(?:[kM]?(?:\\Omega|Ω)|(?:\\mu\s*|[μµ])[gLms])(?=\s*(?:\}|$))", r"\1"),
    # Markdown: code, bold and italic; and the same as HTML.
    (r"`+", " "),
    (rf"{_BEFORE}(\*{{1,3}})(?=[^\s*])([^*\n]*[^\s*\\])\1{_AFTER}", r"\2"),
    (rf"{_BEFORE}(_{{1,3}})(?=[^\s_{{])([^_\n]*[^\s_\\])\1{_AFTER}", r"\2"),
    (r"<(b|strong|i|em|code|u)>([^<>\n]*)</\1>", r"\2"),
    (r"</?answer>", "\n"),
    # A power, which math-verify cannot read, and a product, which it would read as a sum.
    (r"(?<=[\w)}])(?:(\s?)\*\*\1(-?\w+)(?![\w*])|\^(-\d+))", r"^{\2\3}"),
    (r"((?<![\w.}])\d+|\))\((?=[\d-])", r"\1\\cdot("),
    # Commands for letters, and words before the result, that math-verify does not know.
    (r"\\(?:boldsymbol|bm|pmb|mathsf|text(?:sf|tt))(?=\s*\{)", r"\\mathbf"),
    (r"\\(?:(?:(?:text|script)style|bf|it|[lL]arge)(?![A-Za-z])|(?:text)?color\s*\{[^{}]*\})", ""),
    (r"\{\s*\\rm\b\s*([^{}]*)\}|\\rm\b\s*([A-Za-z]+(?:\s*/\s*[A-Za-z]+)*)", r"\\text{\1\2}"),
    (r"^\s*\\text\s*\{[^{}]*(?::|\bis)\s*\}", ""),
    # Currency. A dollar that is not escaped may begin math: only behind a minus and before a lone number it does not.
    (r"(?:\bUS)?\\\$\s*", ""),
    (r"(?<![\w$\\})])-\$(?=(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?![\d$]))", "-"),
    (r"[€£¥₹₽₩]\s*(?=-?[\d.])|(?<=\d)\s*[€£¥₹₽₩]", ""),
    (r"(?<=\d)\s+(?:dollars?|cents?|euros?|USD|EUR)\b", ""),
]
_OTHER_ASCII, _OTHER_DIGIT = re.compile("[！-～]"), re.compile(r"(?![0-9])\d")
_COMPILED = [(re.compile(pattern), to) for pattern, to in _RULES]
_POWERS = ("thousand", "million", "billion", "trillion")
_LARGE = re.compile(rf"(?<=[\d}}])(?:[\s~]|\\[,;: ])*(\\[mt]\w+\s*\{{\s*)?({'|'.join(_POWERS)})\b(?(1)[^{{}}]*\}})")
_SPACED = re.compile(r"(?<![\w.,])(\d{1,3}(?: \d{3})+)(?![\w,])")
_EXPONENT = re.compile(
    r"(?<![\w.])(?:(\d+\.\d+)[eE]\+?(-?\d+)|(\d+)[eE](?:\+(?=\d\d))?(\d+|-\d{2,}))(?!\w|\.\d)(?:\.(?=\s|$))?"
    r"|(?:(?<=[\d)\]}])|(?<=(?<![A-Za-z])[a-ln-rt-zA-Zπ]))([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)(?:\.(?=\s|$))?"
)

# Decimals with a cycle, and whole numbers with a fraction: math-verify would drop the cycle, and read 3 1/2 as (3+1)/2.
# Numbers of more than 30 digits stay: Python refuses to read very long ones.

_WHOLE = r"(?<![\w.])(?<!\d,)(?P<whole>\d{1,3}(?:,\d{3}){1,9}|\d{1,30})"
_DOT = r"\\dot\s*(?:\{\d{1,30}\}|\d)"
_CYCLE = re.compile(
    rf"(?:{_WHOLE}|(?<!\w))\.(?P<fixed>\d{{0,30}})"
    rf"(?P<cycle>\\(?:overline|bar)\s*(?:\{{\s*\d{{1,30}}\s*\}}|\d)|{_DOT}(?:\d{{0,30}}{_DOT})?|\(\d{{1,30}}\))(?!\d)"
)
_PROPER = r"(?:\{(?P<top>\d{1,30})\}\s*\{(?P<bottom>\d{1,30})\}|(?P<pair>\d\d))"
_MIXED = re.compile(
    rf"(?<![/^)\]])(?<!\\sqrt ){_WHOLE}(?:"
    r"\s+(?P<over>\d{1,30})/(?P<under>\d{1,30})(?![\w/]|\.\d)"
    # A letter behind it makes it a product.
    rf"|\s*\\[dt]?frac\s*{_PROPER}(?![\w(^{{]|\\(?!%)|\s+[a-z]\b))"
)
_ONE_SIGN = re.compile(rf"(?:{_WHOLE}\s?)?(?P<sign>[¼-¾⅐-⅞])")


def plain(text: str) -> str:
    """Return a text without markup around and in its expressions, and with numbers in math-verify's form."""
    text = _OTHER_ASCII.sub(lambda found: normalize("NFKC", found[0]), text)
    text = _OTHER_DIGIT.sub(lambda found: str(int(found[0])), text)
    text = _ONE_SIGN.sub(_sign, text)
    text = _LARGE.sub(lambda found: f"*1{'000' * (_POWERS.index(found[2]) + 1)}", text)
    for pattern, to in _COMPILED:
        text = pattern.sub(to, text)
    text = _SPACED.sub(lambda found: found[1].replace(" ", ""), text)
    text = _CYCLE.sub(_repeating, text)
    text = _MIXED.sub(_improper, text)
    return _EXPONENT.sub(_power, text)


def _repeating(found: re.Match[str]) -> str:
    """Return a decimal with repeating last digits as a fraction: 2.1666... is (216 - 21) / 90."""
    fixed, cycle = found["fixed"], re.sub(r"\D", "", found["cycle"])
    before = int((found["whole"] or "0").replace(",", "") + fixed)
    over = int(f"{before}{cycle}") - before
    return rf"\frac{{{over}}}{{{(10 ** len(cycle) - 1) * 10 ** len(fixed)}}}"


def _improper(found: re.Match[str]) -> str:
    """Return a whole number with a proper fraction, such as 3 1/2, as one fraction."""
    pair = found["pair"] or "00"
    over, under = int(found["over"] or found["top"] or pair[0]), int(found["under"] or found["bottom"] or pair[1])
    whole = int(found["whole"].replace(",", ""))
    return rf"\frac{{{whole * under + over}}}{{{under}}}" if over < under else found[0]


def _sign(found: re.Match[str]) -> str:
    """Return a character such as ½, with the whole number before it, as one fraction."""
    over, under = normalize("NFKC", found["sign"]).split("\u2044")
    return rf"\frac{{{int((found['whole'] or '0').replace(',', '')) * int(under) + int(over)}}}{{{under}}}"


def _power(found: re.Match[str]) -> str:
    """Return a power in a form that is right in LaTeX and in plain text."""
    if found[5]:
        return f"^({found[5].translate(_SUPERSCRIPTS)})"
    return f"{found[1] or found[3]}*10^({found[2] or found[4]})"


def final_integer(text: str) -> int | None:
    """Return the integer between the last `####` (and one space, if any) and the end of `text`. None: no integer."""
    _, marker, tail = text.rpartition("####")
    tail = tail.removeprefix(" ")
    if not marker or not re.fullmatch(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})", tail):
        return None
    return int(tail.replace(",", ""))


_SECONDS = 1
"""Processor seconds that an answer may take. Ordinary answers take a tenth of this."""
_LONGEST = 4000
"""The last statement is searched in this many characters at the end of an answer."""
_DIGITS = 50
"""Number of digits to which a value that is no fraction is computed for a comparison."""


def math(answer: str, reference: str, finished: bool) -> float:
    """Return 1 if the model ended the answer and its last statement equals the reference's result, else 0.

    The result is in the last `\\boxed{}` (boxes side by side are one set), or after `####`, else it is the last
    expression of the text. It is read to its end, so `2√2` is not 2. Thoughts do not count. An answer on which
    math-verify fails, or takes more than a second, is wrong. Raises ValueError: it cannot read `reference`.
    """
    if not finished:
        return 0.0
    if (gold := final_integer(reference)) is not None and final_integer(answer) == gold:
        return 1.0
    if not (expected := _expected(reference)):
        raise ValueError(f"found {reference!r}, expected a reference with an expression that math-verify can read")
    child = os.fork()  # a process can be ended in the middle of 10000000!, or of a regular expression
    if child == 0:
        right = False
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
            own = [value for text in results(answer, stated=True) for value in _read(text)]
            right = any(_compared(*pair) for pair in product(expected, own))
        finally:
            os._exit(not right)
    return float(os.waitpid(child, 0)[1] == 0)


@lru_cache(maxsize=256)
def _expected(reference: str) -> list[Any]:
    return [value for text in results(reference, stated=False) for value in _read(text)]


def _read(result: str) -> list[Any]:
    """Return the value that math-verify reads in a text, if it can, and the normalized text. [] for an empty text."""
    from latex2sympy2_extended.latex2sympy2 import convert_to_pct, normalize_latex
    from math_verify.parser import LatexExtractionConfig, parse_latex_cached

    result = re.sub(r"^\s*(?:=|~|\\approx)", "", result).strip(" \n$").rstrip(" .,;:$")
    bare = re.sub(r"^(?:[^,]*=)?(.*?)\s*\\?%$", r"\1", result)
    config = LatexExtractionConfig().normalization_config
    text = normalize_latex(bare, replace(config, units=False))
    if _NOT_ONE.search(text):
        return [" ".join(re.sub(r"\\text|[{}]", " ", text).split())]
    text = normalize_latex(bare, replace(config, units=not _FACTOR.search(bare)))
    if not text:
        return []
    try:
        value = parse_latex_cached(text)
        return [value if bare == result else convert_to_pct(value), text]
    except Exception:  # it raises nearly anything on what it cannot read
        return [text]


_FACTOR = re.compile(rf"[\d)}}](?:(?!{_UNIT}$)[a-zA-Z]{{1,2}}|\s+[a-zA-Z])$")
"""Factors at the end of a text that math-verify would take for a unit, as in 2ab."""
_NOT_ONE = re.compile(
    r"(?<!frac )(?<!binom )(?<![\d.])\d[\d.]*(?:\s|\\q?quad)+(?:[A-Za-z]+\s+)?\d|^[+/^*]\s"
    r"|\d\s*\\text\s*\{[^{}]*\}.*(?<![\^_\d-])(?<![\^_-]\{)\d.*\}$"
)
"""Numbers side by side, which math-verify would add, or behind a unit, which it would drop; a text that begins late."""

# Where a text states its result.

_GROUP = r"[^{}\\]|\\."
for _ in range(12):
    _GROUP = rf"[^{{}}\\]|\\.|\{{(?:{_GROUP})*\}}"
_BOX = re.compile(
    rf"\\(?:boxed|fbox)(?![a-zA-Z])\s*(?:\{{(?P<group>(?:{_GROUP})*)\}}"
    rf"|(?P<word>(?:[^\s{{}}$,.\\]|[,.](?=\d)|\\\S|\{{(?:{_GROUP})*\}})+))?"
    r"(?P<percent>[\s$]*\\?%)?",
    re.DOTALL,
)
_BETWEEN = re.compile(
    r"[\s$\\()]*(?:,|;|,?\s*(?:text\{\s*)?(?:and|or)\b|\\q?quad)[\s$\\()}]*(?:[a-zA-Z](?:_\w)?\s*=\s*)?|[ \t$]*"
)
_MATH = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\\w])\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\d)"
    r"|(\\begin\{(?P<name>\w+)\}.+?\\end\{(?P=name)\})",
    re.DOTALL,
)
_ANSWER = re.compile(r"(?i)\banswers?\b(?:[^.?!\n]*?(?:\b(?:is|are|be|equals?)\b|[:=])|(?=\W*\d))")
_TAKEN_BACK = re.compile(
    r"(?i)\bno\b(?=\s*[,.;:!–—-])|^\s*not\b|\bnot\b[^.\n]*\bbut\b|\b(?:wait|actually|sorry|oops|hmm+|wrong|incorrect"
    r"|mistaken|made an? \w+|correction|rather|instead|i mean|should be|make that|let me re-?\w+)\b"
)
_PROSE = re.compile(
    # Remarks, signs, and words. Those at a number are its unit; two letters there are a product.
    rf"\n\s*(?:\d+[.)]|[-*+>|#]+)\s+|\s\([^()\\\n]*[A-Za-z]{{3}}[^()\\\n]*\)|[\n?;\"“”—←-⇿∎■-➿\U0001f000-\U0001faff]"
    rf"|[:.](?!\d)|(?<![\w)}}\]])!|\s\||\|\s|<<[^<>\n]*>>|\(?\b[A-Za-z]\)(?=\s)|\b[aAI]\s(?=[\d$-]|[a-z]{{2}})"
    rf"|(?<=[\d)}}]\s)[A-Z](?!\w)|(?:(?<=\d)\s*|(?<=[)}}])\s+){_UNIT}(?:\s*/\s*{_UNIT})*(?![\w^(])|(?<=\d)(?:st|nd|rd|th|[ap]m)\b"
    r"|(?:(?<![\\\w])[A-Za-z]{2}|(?<=\d)[A-Za-z]{3})[\w'’]*"
)


def results(text: str, *, stated: bool) -> list[str]:
    """Return the texts that may be the result. stated: if a text has no mark, use only its last statement."""
    text = text.rpartition("</think>")[2]
    _, mark, tail = text.rpartition("####")
    line, _, below = tail.strip().partition("\n") if mark else ("", "", "")
    line = plain(line[:_LONGEST])
    heading = not _expressions(line)
    if (boxed := _boxed(text if heading else tail)) is not None:
        return [plain(boxed)]
    if mark:
        below = plain(below[:_LONGEST]) if heading else line if _PROSE.search(line) else ""
        return [line, *_statement(below, lone=not heading)]
    text = plain(text[-_LONGEST:])
    return _statement(text) if stated else [text, *_statement(text, lone=not re.search(r"[.!?\n]\s", text))]


def _boxed(text: str) -> str | None:
    """Return the contents of the last box and of boxes next to it. "": the last box is not closed. None: no box."""
    held: list[str] = []
    begin = len(text)
    for box in reversed([*_BOX.finditer(text)]):
        content = (box["group"] or box["word"] or "") + (r"\%" if box["percent"] else "")
        if held and not (content and _BETWEEN.fullmatch(text[box.end() : begin])):
            break
        held, begin = [content, *held] if [content] != held[:1] else held, box.start()
        if not content:
            break
    return ",".join(held) if held else None


def _statement(text: str, *, lone: bool = False) -> list[str]:
    """Return the first expression after the last `answer is`, or the last one if the text takes it back (`no, wait`).
    Without `answer is`, return the text's last expression. lone: then return none if there are several."""
    for said in reversed([*_ANSWER.finditer(text)]):
        if found := _expressions(behind := text[said.end() :]):
            for back in reversed([*_TAKEN_BACK.finditer(behind)]):
                if later := _expressions(behind[back.end() :]):
                    return later[-1:]
            return found[:1]
    found = _expressions(text)
    return found[-1:] if len(found) == 1 or not lone else []


def _expressions(text: str) -> list[str]:
    """Return the expressions of a text in order. An expression is everything between two words."""
    held, signs = [next(filter(None, math.groups())) for math in _MATH.finditer(text)], map(chr, count(0xE000))
    text = _MATH.sub(lambda _: next(signs), text)  # which holds words that are no prose
    text = re.sub(r"\\(?:text|mathrm|mbox)(?:bf|it|rm)?\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])", ",", text)
    found = [_trimmed(part) for part in _PROSE.split(text)]
    return [
        re.sub(r"[\ue000-\uf8ff]", lambda sign: held[ord(sign[0]) - 0xE000], part)
        for part in found
        if re.search(r"[\dπ∞\ue000-\uf8ff]|\\[a-zA-Z]", part)
    ]


def _trimmed(part: str) -> str:
    """Return a text without signs at its ends that belong to the sentence, such as a single bracket."""
    part = re.sub(r",(?:\s*,)+", ",", part).strip(" \t,=*_#$'")
    part = re.sub(r"^[->]\s+|\s*-+$", "", part)
    depth = sum((sign in "([") - (sign in ")]") for sign in part)
    if depth < 0:
        return part.rstrip(" ,)]")
    return part.lstrip("([").rstrip(" ,([") if depth > 0 else part


def _compared(gold: Any, own: Any) -> bool:
    from sympy import nan, zoo

    try:
        # What is written alike needs no arithmetic, which of 10^{10^{10}} would take for ever.
        return bool(gold == own and gold not in (nan, zoo)) or _equal(_exact(gold), _exact(own))
    except Exception:  # sympy raises nearly anything on adversarial text, and such an answer is wrong
        return False


def _exact(value: Any) -> Any:
    """Return an expression with rational parts computed and with decimals as fractions. math-verify rounds floats to
    six decimals, so that 1.6e-19 and 9.1e-31 would be equal."""
    from sympy import Basic, Float, MatrixBase, Mul, Rational, Rel, UnevaluatedExpr

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
        value = value.func(*after, evaluate=False) if isinstance(value, Rel) else value.func(*after)
    if value.is_number and (computed := value.doit()).is_Rational:
        return computed
    return value


def _percent(value: Any) -> Any:
    """Return N for N percent. None: it is no percentage. math-verify reads a minus as a separate factor."""
    from sympy import Mul, Rational, UnevaluatedExpr

    hundredth = UnevaluatedExpr(Rational(1, 100))
    if not isinstance(value, Mul) or value.args.count(hundredth) != 1:
        return None
    return Mul(*(part for part in value.args if part != hundredth))


def _equal(gold: Any, own: Any) -> bool:
    """Compare two expressions. Numbers are compared by their exact values, all others by math-verify."""
    from math_verify import verify

    if not (getattr(gold, "is_number", False) and getattr(own, "is_number", False)):
        return bool(verify(gold, own, numeric_precision=_DIGITS, allow_set_relation_comp=True, timeout_seconds=None))
    shares = [_percent(gold), _percent(own)]
    bare = [n if s is None else s for n, s in zip((gold, own), shares)]
    # 25% is right for 0.25, and for 25 in an answer that leaves the sign out, or adds it.
    return _same_number(gold, own) or (shares.count(None) == 1 and _same_number(*bare))


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
    """Do the work that would make the first comparison of a process take seconds."""
    logging.disable(logging.CRITICAL)
    for text in ("2x+1", r"\frac{\sqrt{3}}{2}", "(1,2]", r"\{1,2\}", r"x=5\%"):
        _compared(_read(text)[0], _read("0.5")[0])
