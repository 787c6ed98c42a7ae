r"""Texts as math-verify reads them: without Markdown, currency, and separators of digits.

Each rule looks at what stands beside, so that mathematics stays: `2**3` is a power, `a_1` an index, `$x$` is math.
"""

from __future__ import annotations

import re

_NUMBER = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_BEFORE, _AFTER = r"(?<![\w)\]}*\\$])", r"(?![\w*$])"

_RULES = [
    # Signs that LaTeX writes otherwise.
    (r"[−–](?=[\d.$\\])", "-"),
    (r"[×⋅·](?=\s*[\d(])", "*"),
    (r"÷", "/"),
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
    (r"(?<=\d)(?:\\[,!;: ]|\{,\}|~|[\u00a0\u2009\u202f'’])(?=\d{3}(?!\d))", ""),
]
_COMPILED = [(re.compile(pattern), to) for pattern, to in _RULES]
_SPACED = re.compile(r"(?<![\w.,])(\d{1,3}(?: \d{3})+)(?![\w,])")
_EXPONENT = re.compile(
    r"(?<![\w.])(?:(\d+\.\d+)[eE]\+?(-?\d+)|(\d+)[eE]\+?(-?\d{2,}))(?!\w|\.\d)(?:\.(?=\s|$))?"
    r"|(?<=10)([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)(?:\.(?=\s|$))?"
)


def plain(text: str) -> str:
    """Return a text with its expressions as they are, and without what is written around and within them for people."""
    for pattern, to in _COMPILED:
        text = pattern.sub(to, text)
    text = _SPACED.sub(lambda found: found[1].replace(" ", ""), text)
    return _EXPONENT.sub(_power, text)


def _power(found: re.Match[str]) -> str:
    """A power of ten, as both LaTeX and a line of text may have it."""
    if found[5]:
        return f"^({found[5].translate(_SUPERSCRIPTS)})"
    return f"{found[1] or found[3]}*10^({found[2] or found[4]})"
