"""What a compiled loop adds and multiplies, and in which order, whatever the schedule of its instructions.

An instruction's value is described by its name and those of its operands, so that a sum of many numbers is a tree, and
another order of addition is another tree. What comes from memory or from outside the loop has no description, a
number of a matrix product is described by its place in the tile. A number or a constant, whichever some conditions
choose, is described by the two, in however many steps they choose: the steps change no bit.
"""

import hashlib
import re
from collections import Counter
from typing import Any

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_ARITHMETIC = {"FADD", "FMUL", "FFMA", "FMNMX", "MUFU", "F2FP", "SHFL", "FSEL"}
_EITHER_WAY = {"FADD", "FMUL", "FFMA", "FMNMX", "FSEL"}
"""The first two operands may be exchanged."""


def arithmetic(loop: str) -> Counter[str]:
    """The instructions of a loop, disassembled, that compute in floating point: how many there are of each
    description."""
    held: dict[str, str] = {}
    choices: dict[str, set[str]] = {}
    found: Counter[str] = Counter()
    for line in loop.splitlines():
        if (instruction := _INSTRUCTION.search(line)) is None:
            continue
        name, operands = instruction[1], [each.strip() for each in instruction[2].split(",")]
        kind = name.split(".")[0]
        if kind in ("HGMMA", "QGMMA"):
            columns, first = int(name.split("x")[1]), int(operands[0][1:])
            held |= {f"R{first + i}": f"{name} {i}" for i in range(columns // 2)}
            found[name] += 1
        elif kind in _ARITHMETIC:
            result, *sources = operands[1:] if kind == "SHFL" else operands
            read = [_described(source, held) for source in sources]
            if kind in _EITHER_WAY:
                read[:2] = sorted(read[:2])
            if kind == "FSEL":
                read = read[:2]  # whatever the condition
                if before := [each for each in read if {*read} - {each} <= choices.get(each, set())]:
                    held[result] = before[0]
                    continue
            text = f"{name} {' '.join(read)}"
            held[result] = hashlib.sha256(text.encode()).hexdigest()[:16]
            if kind == "FSEL":
                choices[held[result]] = {*read} - {"outside"}
            found[f"{name} {held[result]}"] += 1
        elif operands[0].startswith("R"):
            wide = re.search(r"\.(64|128)\b", name)
            first = re.match(r"R(\d+)", operands[0])
            for i in range(int(wide[1]) // 32 if wide else 1):
                held.pop(f"R{int(first[1]) + i}" if first else operands[0], None)
    return found


def in_one_order(kernels: list[dict[str, Any]]) -> list[dict[str, int]]:
    """What the loops of each of these kernels compute: the same."""
    first, *others = [kernel["arithmetic"] for kernel in kernels]
    for place, other in enumerate(others, 1):
        assert other == first, f"{kernels[0]['name']}: variant {place}"
    return first  # type: ignore[no-any-return]


def named(kernels: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [kernel for kernel in kernels if kernel["name"] == name]


def only_unpacks(codes: dict[str, Any], plain: dict[str, Any]) -> bool:
    """True if loops over codes compute what loops over BF16 numbers do, beside making such numbers of the codes."""
    pairs = [map(Counter, both) for both in zip(codes["arithmetic"], plain["arithmetic"], strict=True)]
    return all(not loop - own and all(text.startswith("F2FP") for text in own - loop) for own, loop in pairs)


def _described(operand: str, held: dict[str, str]) -> str:
    bare = operand.replace(".reuse", "")
    register = re.search(r"(?<!U)R\d+", bare)
    if register is None:
        return "outside" if re.search(r"UR\d+|c\[", bare) else re.sub(r"P\d", "P", bare)
    sign = "-" if bare.startswith("-") else ""
    return f"{sign}{'|' if '|' in bare else ''}{held.get(register[0], 'outside')}"
