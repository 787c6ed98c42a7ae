"""Compiles whatever Triton kernels a function launches for an H200 (sm_90a), on a machine without a GPU."""

import contextlib
import dataclasses
import itertools
import math
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from fp8rl.numerics.kernels.cache import no_device
from tests.support.sass import arithmetic


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel as it would run. blocks: of its grid. shared: bytes. spilled: bytes of a thread's stack.
    respilled: loads and stores of these in innermost loops with products (-1: not disassembled). brought: bytes that a
    thread copies into shared memory in a step of each of these loops. under_way: groups of copies that may still be
    under way when a step begins to compute (-1: it waits for none). barriers: how often all threads wait for each other
    in each of these loops. instructions: the matrix and cast instructions of its PTX. divisions: IEEE divisions in
    FP32, as often as they are written there. sums: the layouts in which its FP32 matrices are reduced, which decide the
    order of addition. arithmetic: what each of the loops with products computes, or the whole kernel if it has none
    (`tests.support.sass`)."""

    name: str
    blocks: int
    shared: int
    registers: int
    spilled: int
    respilled: int
    brought: tuple[int, ...]
    under_way: tuple[int, ...]
    barriers: tuple[int, ...]
    arithmetic: tuple[dict[str, int], ...]
    instructions: tuple[str, ...]
    divisions: int
    sums: tuple[str, ...]


@contextlib.contextmanager
def compiled_only(loops: bool = False) -> Iterator[list[Compiled]]:
    """Inside, a launch compiles its kernel for the H200 and runs nothing; the list fills with what was compiled.

    loops: kernels are disassembled in the end, and what is said of their loops is filled in.
    """
    found: list[Compiled] = []
    codes: list[bytes] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(_described(self.__name__, math.prod(grid), kernel))
        codes.append(_code(kernel.asm["cubin"]))
        return kernel

    JITFunction.run = compile_only
    try:
        with no_device():
            yield found
    finally:
        JITFunction.run = run
    if loops:
        found[:] = map(_with_loops, found, _disassembled(codes))


def _described(name: str, blocks: int, kernel: Any) -> Compiled:
    ptx = kernel.asm["ptx"]
    wanted = r"cvt\.rn\.satfinite[.\w]+|wgmma\.mma_async[.\w]+|mma\.sync[.\w]+|fma\.rn\.f32"
    return Compiled(
        name, blocks, kernel.metadata.shared, *_resources(kernel.asm["cubin"]), -1, (), (), (), (),
        tuple(sorted(set(re.findall(wanted, ptx)))), ptx.count("div.rn.f32"), _sums(kernel.asm["ttgir"]),
    )  # fmt: skip


def _sums(ttgir: str) -> tuple[str, ...]:
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    reduced = re.findall(r"\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)", ttgir)
    return tuple(sorted({layouts[name] for name in reduced}))


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack, which is what did not fit into them."""
    usage = _shown(triton.knobs.nvidia.cuobjdump, cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2])


def _shown(tool: Any, image: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(image)
        file.flush()
        return subprocess.run([tool.path, *options, file.name], capture_output=True, text=True, check=True).stdout


def _code(cubin: bytes) -> bytes:
    """The instructions of an ELF file's one kernel."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * each) for each in range(count)]
    (code,) = (each for each in sections if cubin.startswith(b".text.", sections[names][4] + each[0]))
    return cubin[code[4] : code[4] + code[5]]


def _disassembled(codes: list[bytes]) -> Iterator[list[str]]:
    """The lines of each kernel, from one process, most of whose time goes before the first; 16 bytes are one."""
    text = _shown(triton.knobs.nvidia.nvdisasm, b"".join(codes), "--binary", "SM90a")
    lines = iter([line for line in text.splitlines() if re.match(r"\s*/\*[0-9a-f]+\*/", line)])
    for code in codes:
        yield list(itertools.islice(lines, len(code) // 16))


def _with_loops(kernel: Compiled, lines: list[str]) -> Compiled:
    loops = list(_loops(lines))
    waits = [re.findall(r"\bDEPBAR\.LE SB0, (0x\w+)", loop) for loop in loops]
    return dataclasses.replace(
        kernel,
        respilled=sum(len(re.findall(r"\b(?:STL|LDL)\b", loop)) for loop in loops),
        brought=tuple(sum(map(_bytes, loop.splitlines())) for loop in loops),
        under_way=tuple(min((int(left, 16) for left in some), default=-1) for some in waits),
        barriers=tuple(len(re.findall(r"\bBAR\.SYNC\S* 0x\w+ ;", loop)) for loop in loops),
        arithmetic=tuple(dict(arithmetic(each)) for each in loops or ["\n".join(lines)]),
    )


def _bytes(line: str) -> int:
    """What an instruction copies from global to shared memory, 4 bytes unless it says how many bits."""
    found = re.search(r"\bLDGSTS(\S*)", line)
    width = found and re.search(r"\.(64|128)\b", found[1])
    return 0 if found is None else int(width[1]) // 8 if width else 4


def _loops(lines: list[str]) -> Iterator[str]:
    """The innermost loops with products: from an instruction to a jump back to it, with no other such loop between
    them."""
    places = {int(line.split("*/")[0].strip(" /*"), 16): number for number, line in enumerate(lines)}
    jumps = [
        (places[int(found[1], 16)], end)
        for end, line in enumerate(lines)
        if (found := re.search(r"BRA\b.* 0x(\w+)", line))
    ]
    loops = [(start, end) for start, end in jumps if start < end and "GMMA" in "".join(lines[start:end])]
    for start, end in loops:
        if not any(start <= other and last <= end and (start, end) != (other, last) for other, last in loops):
            yield "\n".join(lines[start:end])
