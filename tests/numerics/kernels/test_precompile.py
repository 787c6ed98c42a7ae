"""Kernels that one process needed are compiled for another: without a GPU, for others, and nothing twice."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.commands import result_of
from tests.support.elsewhere import compiling, found_elsewhere
from tests.support.paths import EXAMPLES, ROOT

pytestmark = pytest.mark.slow

CALLS = """
import json, sys
from pathlib import Path
import torch
import triton
from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.kernels import cache
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from tests.support.hopper import compiled_only
from tests.support.launches import META, address

SPEC = QuantSpec.preset("fp8_block_pow2")

def calls(dtype=torch.bfloat16):
    x, w = torch.empty(300, 256, dtype=dtype, device=META), torch.empty(384, 256, dtype=torch.bfloat16, device=META)
    ops.rms_norm(x, w[0], 1e-6)
    ops.group_by_expert(torch.empty(300, 2, dtype=torch.int64, device=META), 8)
    operand = ops.weight_operand(quantize(w, SPEC.weight))
    ops.fp8_linear(x, w, operand, SPEC)
    ops.add_by_token(torch.empty(1000, 256, device=META), x, torch.empty(300, dtype=torch.int64, device=META))

def missed(dtype=torch.bfloat16):
    \"\"\"What a process compiles that launches these.\"\"\"
    found = []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or found.append(src.name)
    torch.Tensor.data_ptr = address
    with using("triton"), torch.no_grad(), compiled_only():
        calls(dtype)
    return found
"""
LISTED = """
cache.watch()
torch.Tensor.data_ptr = address
with using("triton"), torch.no_grad(), compiled_only() as found:
    calls()
variants = cache.read_list(cache.directory() / cache.LIST)
print(json.dumps([sorted(each.name for each in found), sorted(each.kernel.rpartition(":")[2] for each in variants)]))
"""
COMPILED = """
said, variants = [], cache.read_list(Path(sys.argv[1]))
found, again = (cache.compile_all(variants, (9, 0), some, said.append) for some in (2, 1))
print(json.dumps([found.compiled, found.cached, again.compiled, again.cached, said]))
"""


def test_what_a_process_needed_is_compiled_for_a_second_one_also_where_the_cache_is_carried_to(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    launched, listed = found_elsewhere(CALLS + LISTED)
    assert listed == sorted(listed) and set(launched) == set(listed) and len(listed) >= 5
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made"))
    compiled, cached, again, kept, said = found_elsewhere(CALLS + COMPILED, str(tmp_path / "first/fp8rl_kernels.jsonl"))
    assert len(compiled) == len(listed) == kept == len(said) and cached == 0 and again == []
    assert said[-1].startswith("compiled ") and said[-1].endswith(f"({kept} of {kept} kernels)")
    (tmp_path / "made").rename(tmp_path / "carried")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "carried"))
    missed, others = found_elsewhere(CALLS + "cache.relocate()\nprint(json.dumps([missed(), missed(torch.float32)]))")
    assert missed == [] and len(others) >= 2, "FP32 activations are other variants"


WARMED = """
import json, os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # one process compiles
from typer.testing import CliRunner
from fp8rl.cli import app
said = [CliRunner().invoke(app, ["warm", sys.argv[1], "--gpu", gpu, "--json"]) for gpu in ("h100", "h100", "b200")]
print(json.dumps([each.stdout for each in said]))
"""


def test_lists_that_are_kept_are_compiled_without_a_gpu_and_for_another_one(tmp_path, monkeypatch) -> None:
    few: list[str] = []
    for name in ("arithmetic", "qwen3_30b_a3b"):
        lines = (EXAMPLES / f"kernels/{name}.jsonl").read_text().splitlines()
        assert len(lines) == len(set(lines)) > 140
        few += sorted(set(lines) - set(few), key=len)[:1]
    (tmp_path / "few.jsonl").write_text("\n".join(few) + "\n")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    first, again, other = map(json.loads, found_elsewhere(WARMED, str(tmp_path / "few.jsonl")))
    assert first == {"directory": str(tmp_path / "cache"), "kernels": len(few), "compiled": len(few)} == other
    assert again == first | {"compiled": 0}


FITTING = """
import json, sys
from pathlib import Path
from fp8rl.numerics.kernels import cache
from lab.bench.gpu.fifteen.kernels import fits, listed
variants = listed() if sys.argv[1] == "fifteen" else cache.read_list(Path(sys.argv[1]))
changed = cache.Variant(variants[0].kernel, variants[0].data.replace("_ptr", "_pointer"))
gone = cache.Variant(variants[0].kernel + "_", variants[0].data)
print(json.dumps([len(set(variants)), sorted({each.kernel for each in variants if not fits(each)}),
                  fits(changed) or fits(gone)]))
"""


@pytest.mark.parametrize("name", ["arithmetic", "qwen3_30b_a3b", "fifteen"])
def test_kernels_of_lists_are_there_with_these_arguments(name: str) -> None:
    path = EXAMPLES / f"kernels/{name}.jsonl"
    count, unfit, others_fit = found_elsewhere(FITTING, str(path) if path.exists() else name)
    assert count > 140 and unfit == [] and not others_fit, "`python -m lab.kernel_lists` writes the lists again"


@pytest.mark.parametrize("text", ["{}", '{"kernel": "os:system"}', "no JSON"])
def test_a_file_that_is_no_list_of_ours_is_refused(text: str, tmp_path) -> None:
    (tmp_path / "list").write_text(text)
    done = result_of("warm", tmp_path / "list", "--gpu", "h100")
    assert done.exit_code == 2 and "expected a list that a run or `fp8rl doctor` wrote" in done.stderr


KEYS = """
import json
from fp8rl.numerics.kernels import kernels
from triton.language import constexpr
from triton.runtime.jit import JITFunction
functions = [v for m in kernels._modules() for v in vars(m).values() if isinstance(v, JITFunction)]
keys = {f"{f.module}.{f.__name__}": f.cache_key for f in functions[::STEP]}
names = {}
for function in functions:
    for (name, _), (value, _) in function.used_global_vals.items():
        if isinstance(value, constexpr):
            names.setdefault(name, set()).add(repr(value))
ops = sorted({*kernels.KERNELS} & {function.__name__ for function in functions})
print(json.dumps([keys, {name: sorted(values) for name, values in names.items()}, ops]))
"""


def test_a_kernel_s_key_does_not_depend_on_what_was_launched_before_it() -> None:
    """Nor on the addresses of modules, by which Triton sorts globals of one name: they are others in each process. What
    Triton compiles has no op's name: it would be called in place of the op."""

    def found(step: str):
        command = [sys.executable, "-c", KEYS.replace("STEP", step)]
        return json.loads(subprocess.run(command, env=compiling(), capture_output=True, check=True).stdout)

    (forwards, names, ops), (backwards, *_) = found("1"), found("-1")
    assert len(forwards) > 40 and forwards == backwards
    assert all(len(values) == 1 for values in names.values()), names
    assert ops == []


WAITS = """
import os, sys, time
import torch
from fp8rl.numerics.kernels import cache, gates
from tests.support.hopper import compiled_only
from tests.support.launches import META, address
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
cache.watch()
torch.Tensor.data_ptr = address
print("ready", flush=True)
sys.stdin.readline()
with compiled_only():
    gates.swiglu_forward(torch.empty(64, 256, dtype=torch.bfloat16, device=META))
"""


def test_two_processes_do_not_compile_a_kernel_twice(tmp_path) -> None:
    environment = compiling() | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command, pipe = [sys.executable, "-W", "ignore", "-c", WAITS], subprocess.PIPE
    both = [subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for each in both:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    said = [line for each in both for line in each.communicate("\n")[0].splitlines()]
    assert sum(line.startswith("kernels: compiled ") for line in said) == 1, said
