"""Compile the kernels of the two calls for sm_90 without a GPU: `python -m lab.bench.gpu.fifteen.kernels FOLDER`.

`kernels.jsonl.xz` lists them as Triton 3.6.0 describes them: those of the bench's parts at their real sizes, and of the
runs of call 2. They were noted on the meta device on 2026-11-28. A kernel that has changed since is compiled by the
machine when it is first launched; the list then costs time and is otherwise without effect.

FOLDER becomes a Triton cache whose paths are `@CACHE@`; a second call compiles nothing.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
from pathlib import Path

LIST = Path(__file__).with_name("kernels.jsonl.xz")
CAPABILITY = (9, 0)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    from fp8rl.numerics.kernels.cache import Variant, compile_all

    home = str(Path(triton.__file__).parent)
    listed = lzma.decompress(LIST.read_bytes()).decode().replace("@TRITON@", home).splitlines()
    variants = [Variant(*json.loads(line)) for line in listed]
    rewrite(folder, "@CACHE@", str(folder))
    found = compile_all(variants, CAPABILITY, len(os.sched_getaffinity(0)), print)
    counts = f"{len(variants)} kernels, {len(found.compiled)} compiled, {found.cached} in the cache"
    print(f"Triton {triton.__version__}: {counts}")
    rewrite(folder, str(folder), "@CACHE@")


def rewrite(folder: Path, old: str, new: str) -> None:
    """Have the lists of a kernel's files name them elsewhere: Triton writes whole paths into them."""
    for group in folder.glob("*/__grp__*.json"):
        group.write_text(group.read_text().replace(old, new))


if __name__ == "__main__":
    main()
