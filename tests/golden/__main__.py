"""Compare the golden runs with those that are kept for this kind of processor: `python -m tests.golden [NAME ...]`.

Where none are kept, or with `--keep`, they are written anew. The exit status is 1 where a digest differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.golden.runs import KEPT, RUNS, SEEN_ON, digests, kept, processor, processor_model, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *(golden.name for golden in RUNS)])
    parser.add_argument("--keep", action="store_true", help="keep what is found, in place of what was kept")
    asked = parser.parse_args()
    path, known, different = KEPT / f"{processor()}.json", kept(), 0
    with tempfile.TemporaryDirectory(prefix="fp8rl-golden-") as folder:
        for golden in RUNS:
            if asked.names and golden.name not in asked.names:
                continue
            found = digests(run(golden, Path(folder)))
            if asked.keep or golden.name not in known:
                known[golden.name] = found
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(known, indent=2) + "\n")
                print(f"{golden.name}: kept for {processor()}", flush=True)
            elif differing := [name for name, digest in known[golden.name].items() if found.get(name) != digest]:
                different += 1
                print(f"{golden.name}: found other {', '.join(differing)} than are kept for {processor()}", flush=True)
            else:
                print(f"{golden.name}: equal", flush=True)
    seen = known.setdefault(SEEN_ON, [])
    if not different and not asked.names and processor_model() not in seen:
        seen.append(processor_model())
        path.write_text(json.dumps(known, indent=2) + "\n")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
