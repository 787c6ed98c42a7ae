"""Compile the kernels of the two calls for sm_90 without a GPU: `python -m lab.bench.gpu.fifteen.kernels FOLDER`.

`kernels.jsonl.xz` lists them as Triton 3.6.0 describes them: those of the bench's parts at their real sizes, and of the
runs of call 2. `lab.kernel_lists` writes the list. A kernel that is gone or has other arguments is an error; a variant
that the list lacks is compiled by the machine when it is first launched.

FOLDER becomes a Triton cache whose paths are `@CACHE@`; a second call compiles nothing.
"""

from __future__ import annotations

import json
import lzma
import os
import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8rl.numerics.kernels.cache import Variant

LIST = Path(__file__).with_name("kernels.jsonl.xz")
CAPABILITY = (9, 0)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    from fp8rl.numerics.kernels.cache import compile_all

    variants = listed()
    rewrite(folder, "@CACHE@", str(folder))
    found = compile_all(variants, CAPABILITY, len(os.sched_getaffinity(0)), print)
    counts = f"{len(variants)} kernels, {len(found.compiled)} compiled, {found.cached} in the cache"
    print(f"Triton {triton.__version__}: {counts}")
    rewrite(folder, str(folder), "@CACHE@")


def listed() -> list[Variant]:
    from fp8rl.numerics.kernels.cache import Variant

    return [Variant(*json.loads(line)) for line in lzma.decompress(LIST.read_bytes()).decode().splitlines()]


def fits(variant: Variant) -> bool:
    """Return whether a variant's kernel is there, with these arguments and these constants."""
    try:
        parameters = pkgutil.resolve_name(variant.kernel).params
    except (ImportError, AttributeError):
        return False
    data = json.loads(variant.data)
    constants = {place for (place, *_) in data["constant_keys"]}
    named = [each.name for each in parameters] == list(data["signature"])
    return named and all(each.num in constants for each in parameters if each.is_constexpr)


def rewrite(folder: Path, old: str, new: str) -> None:
    """Have the lists of a kernel's files name them elsewhere: Triton writes whole paths into them."""
    for group in folder.glob("*/__grp__*.json"):
        group.write_text(group.read_text().replace(old, new))


if __name__ == "__main__":
    main()
