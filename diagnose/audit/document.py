"""The precision map as the table of docs/precision.md: `python -m fp8rl.diagnose.audit.document` writes it there."""

from __future__ import annotations

from pathlib import Path

from fp8rl.numerics.precision_map import CLASSES, TensorClass

PAGE = Path("docs/precision.md")
BEGIN, END = "<!-- table: python -m fp8rl.diagnose.audit.document -->", "<!-- end of table -->"
_SPEC = {
    "activation": "`activation`",
    "weight": "`weight`",
    "gradient": "`gradient`",
    "served": "`weight`",
    "wire": "`gradient_wire`",
    "gather": "`weight_gather`",
    "operand": "what holds it",
    "dequantized": "what holds it",
}
"""What a spec says, in words: the key of the numerics or the trainer section, or the narrowest format that is exact."""


def table() -> str:
    """The table in Markdown, a line per class."""
    lines = ["| tensors | exact | native | published | why |", "|---|---|---|---|---|"]
    last = ""
    for each in CLASSES:
        if each.row != last:
            lines.append(f"| **{each.row}** | | | | |")
        last = each.row
        exact, native = _formats(each.exact), _formats(each.native)
        if each.kernels != each.exact:
            exact += f"; {_formats(each.kernels)} in Triton kernels"
        lines.append(f"| {_named(each)} | {exact} | {native} | {_formats(each.document)} | {each.why} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """A page with its table made anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def _named(each: TensorClass) -> str:
    return f"{each.tensors} (`{each.key}`)"


def _formats(formats: str) -> str:
    said = [form if form.startswith("{") else form.upper() for form in formats.split("|")]
    return " or ".join(said).format(**_SPEC)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
