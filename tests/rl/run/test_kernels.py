"""Kernels that are compiled before a run: they are those that its ops launch, and nothing is compiled twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8rl.rl.run import kernels
from tests.support.elsewhere import compiling, found_elsewhere
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

RECORDED = """
import json
from pathlib import Path
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.run.kernels import ServedModel, record
said = []
for overrides in json.loads('OVERRIDES'):
    spec = load_experiment(Path("examples/arithmetic.yaml"), [
        "model.path=fp8rl/diagnose/plan/configs/qwen3_30b_a3b", "rollout.context_length=4092",
        "trainer.micro_batch_tokens=8192", *[each for each in overrides if each != "served"],
    ])
    served = ServedModel(spec.model.directory, spec.numerics_config(), spec.rollout)
    subject = ServedModel.of(json.loads(json.dumps(served.to_dict()))) if "served" in overrides else spec
    found, unknown = record(subject, (9, 0))
    said.append({"variants": [[kernel, json.loads(data)["key"]] for kernel, data in found], "unknown": unknown})
print(json.dumps(said))
"""

LAUNCHED = """
import dataclasses, json
import torch
from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.kernels.products import tiles
from lab.bench.gpu.exactness import HEAD, Pages, _as_trainer, engine_forward, make_layer, make_norm
from lab.bench.gpu.measure import Sizes, random
from tests.support.launches import launches

META, CONTEXT = torch.device("meta"), 4096
SHAPE = dataclasses.replace(Sizes.real().stack, vocab=151_936)

def whole(*shape, dtype=torch.int64):
    return torch.empty(*shape, dtype=dtype, device=META)

def served(tokens, sequences):
    caches = [torch.empty(2, 1 << 16, SHAPE.kv_heads, HEAD, dtype=torch.bfloat16, device=META)]
    counts = None if tokens == sequences else whole(sequences, dtype=torch.int32)
    pages = Pages(whole(300, CONTEXT, dtype=torch.int32), whole(sequences), counts, whole(sequences), whole(tokens))
    x = engine_forward(head[whole(tokens)], whole(tokens), [layer], caches, pages, norm, SHAPE)
    logits, temperatures = ops.linear(x[:sequences], head).float(), torch.empty(sequences, device=META)
    drawn = ops.draw(logits, temperatures, whole(sequences), whole(sequences))
    ops.token_logprobs(logits, drawn, temperatures)

def hidden(tokens):
    return ops.rms_norm(_as_trainer(tokens, [layer], head, SHAPE), norm, 1e-6)

def logprobs(rows, length):
    tokens = whole(rows, length)
    logits = ops.linear(hidden(tokens), head)
    return ops.token_logprobs(logits.view(1, rows * length, -1), tokens.view(1, -1), 1.0)[0]

def values(rows, length):
    return (hidden(whole(rows, length)).float() * norm.float()).sum(-1).square()

tiles.allow_short(True)
tiles.allow_wide(True)
with using("triton"):
    with launches():
        layer, norm = make_layer(SHAPE, META), make_norm(SHAPE.hidden, META)
        head = random(SHAPE.vocab, SHAPE.hidden, device=META)
    with launches() as scored, torch.no_grad():
        for batch in ((2, 4096), (1, 777)):
            logprobs(*batch)
    with launches() as found:
        with torch.no_grad():
            for batch in ((1, 1), (3, 3), (64, 64), (100, 100), (256, 256), (17, 2), (333, 1), (8191, 16), (40, 33),
                          (300, 200)):
                served(*batch)
        for tensor in (head, norm, layer.qkv, layer.out):
            tensor.requires_grad_()
        for stack in (layer.w13.weights, layer.w2.weights):
            stack.requires_grad_().main_grad = torch.empty(stack.shape, device=META)  # as Megatron has it
        for batch in ((2, 4096), (1, 777)):
            logprobs(*batch).sum().backward()
            values(*batch).sum().backward()
    with launches() as shared:
        for rows, longest in ((3, 300), (10, 3001)):
            each, table, every = whole(rows), whole(rows, longest).int(), whole(777)
            tree = ops.TokenTree(each, each, table, every, every, every)
            q, k = (torch.empty(777, n, HEAD, device=META).bfloat16().requires_grad_() for n in (32, 4))
            ops.tree_attention(q, k, k, tree, HEAD**-0.5).sum().backward()
print(json.dumps([{name: sorted(keys) for name, keys in each.variants.items()} for each in (found, scored, shared)]))
"""


def recorded(*specs: list[str]) -> list[dict[str, Any]]:
    """What is said of each spec, given by its overrides, in one process: a start of one takes most of the time."""
    found: list[dict[str, Any]] = found_elsewhere(RECORDED.replace("OVERRIDES", json.dumps(specs)))
    return found


def kernels_of(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(kernel.rpartition(".")[2].replace(":", "."), key) for kernel, key in found["variants"]}


def named(variants: dict[str, list[str]]) -> set[tuple[str, str]]:
    return {(name, key) for name, keys in variants.items() for key in keys}


ADAPTED = ["adapter={rank: 8}"]
REFERENCE = [*ADAPTED, "algorithm.kl.loss.coefficient=0.1"]
FAMILIES = {
    "tiny_deepseek": ["trainer.tp=2", "trainer.ep=2", "rollout.tp=2", "trainer.prefix_sharing=true", "numerics.kv=fp8"],
    "tiny_qwen3_next": ["trainer.prefix_sharing=true", "numerics.kv=fp8"],
    "tiny_olmoe": ["trainer.packing=true"],
}


def test_a_spec_says_which_variants_its_ops_launch_whatever_its_family() -> None:
    """Against a forward that is written op by op, at the sizes of Qwen3-30B-A3B, in batches that nobody recorded."""
    families = [[f"model.path=examples/models/{model}", *ranks] for model, ranks in FAMILIES.items()]
    specs = ([], ["served"], ADAPTED, REFERENCE, ["trainer.prefix_sharing=true"], *families)
    found, served, adapted, reference, trees, *others = recorded(*specs)
    need, scored, shared = (named(each) for each in found_elsewhere(LAUNCHED))
    assert found["unknown"] == []
    have = kernels_of(found)
    assert len(need) > 30 and need <= have, need - have
    assert len(kernels_of(served)) > 50 and kernels_of(served) <= have, "what `fp8rl serve` launches of the run"
    assert scored <= kernels_of(reference) and not scored <= kernels_of(adapted), "scored without the adapters"
    assert len(shared) == 4 and shared <= kernels_of(trees), shared - kernels_of(trees)
    assert len(others) == 3
    for other in others:
        assert other["unknown"] == [] and len(other["variants"]) > 100


NATIVE = """
import json
import torch
from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.digest import chunk_sums
from fp8rl.numerics.quantize import QuantizedTensor, quantize, quantize_many, scale_shape
from fp8rl.numerics.spec import QuantSpec
from tests.support.launches import launches

META, SPEC = torch.device("meta"), QuantSpec.preset("fp8_block_pow2")

def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device=META)

def coded(spec, *shape, by_groups=False):
    scales = tensor(*reversed(scale_shape(shape, spec)), dtype=torch.float32).t()
    return QuantizedTensor(tensor(*shape, dtype=spec.dtype), scales if by_groups else scales.contiguous(), spec)

with using("triton"), launches() as found:
    for requests in (1, 7, 64, 256):
        drawn, numbers = tensor(requests, 151936, dtype=torch.float32), tensor(requests, dtype=torch.int64)
        ops.draw(drawn, tensor(requests, dtype=torch.float32), numbers, numbers)
    for tokens in (1, 3, 64, 8191):
        for width in (2048, 4096, 768):
            for by_groups in (False, True):
                codes = coded(SPEC.activation, tokens, width, by_groups=by_groups)
                quantize(tensor(tokens, width), SPEC.activation, codes)
    for count in (1, 5, 16):
        quantize_many([tensor(768, 2048)] * count, SPEC.weight, [coded(SPEC.weight, 768, 2048)] * count)
        for words in (3, 1 << 14, 5 << 14, 16 << 14):
            chunk_sums([tensor(words, dtype=torch.int32)] * count)
    for tokens in (777, 8192):
        logits, named = tensor(1, tokens, 151936).requires_grad_(), tensor(1, tokens, dtype=torch.int64)
        ops.token_logprobs(logits, named, 1.0)[0].sum().backward()
        ops.add_by_token(tensor(151936, 2048, dtype=torch.float32), tensor(tokens, 2048), named[0])
print(json.dumps({name: sorted(keys) for name, keys in found.variants.items()}))
"""


def test_a_native_run_s_own_kernels_are_those_of_its_ends_and_a_critic_adds_none() -> None:
    """In native mode the draw, SGLang's quantizer of activations, a sync, and what a trainer reads and embeds."""
    native, plain, ppo = recorded(["numerics.mode=native"], [], ["algorithm.name=ppo"])
    need, have = named(found_elsewhere(NATIVE)), kernels_of(native)
    assert len(need) >= 9 and need <= have, need - have
    assert len(have) < 20, "layers are Megatron's, TransformerEngine's and SGLang's"
    assert kernels_of(ppo) == kernels_of(plain)


CALLS = """
import json, sys
import torch
import triton
from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.kernels.precompile import META, address, compile_all, recorded
from fp8rl.numerics.kernels import cache
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from tests.support.hopper import compiled_only

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
FILL = """
with recorded((9, 0)) as variants, using("triton"), torch.no_grad():
    calls()
said = []
found = compile_all(variants, (9, 0), 2, said.append)
cache.note_warm("a spec")
again = compile_all(variants, (9, 0), 2, said.append)
print(json.dumps([found.compiled, found.cached, again.compiled, again.cached, said]))
"""


def test_a_second_process_compiles_nothing_also_where_the_cache_was_carried_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made"))
    compiled, cached, again, kept, said = found_elsewhere(CALLS + FILL)
    assert len(compiled) >= 5 and cached == 0 and again == [] and kept == len(compiled) == len(said)
    assert said[-1].startswith("compiled ") and said[-1].endswith(f"({kept} of {kept} kernels)")
    (tmp_path / "made").rename(tmp_path / "carried")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "carried"))
    script = "print(json.dumps([cache.is_warm('a spec'), cache.is_warm('another'), missed(), missed(torch.float32)]))"
    warm, another, missed, others = found_elsewhere(CALLS + script)
    assert (warm, another) == (True, False) and missed == []
    assert len(others) >= 2, "FP32 activations are other variants"


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
print(json.dumps([keys, {name: sorted(values) for name, values in names.items()}]))
"""


def test_a_kernel_s_key_does_not_depend_on_what_was_launched_before_it() -> None:
    """Nor on the addresses of modules, by which Triton sorts globals of one name: they are others in each process."""

    def found(step: str) -> Any:
        command = [sys.executable, "-c", KEYS.replace("STEP", step)]
        return json.loads(subprocess.run(command, env=compiling(), capture_output=True, check=True).stdout)

    (forwards, names), (backwards, _) = found("1"), found("-1")
    assert len(forwards) > 40 and forwards == backwards
    assert all(len(values) == 1 for values in names.values()), names


def test_a_cache_of_another_triton_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8rl.numerics.kernels import cache

    monkeypatch.setattr(cache, "directory", lambda: tmp_path)
    assert cache.problem() is None
    cache.note_warm("a spec")
    assert cache.problem() is None and cache.is_warm("a spec")
    stamp = json.loads((tmp_path / "fp8rl.json").read_text()) | {"triton": "other", "version": "3.6.0"}
    (tmp_path / "fp8rl.json").write_text(json.dumps(stamp))
    assert (cache.problem() or "").startswith(
        f"TRITON_CACHE_DIR: found kernels of Triton 3.6.0 in {tmp_path}, expected"
    )
    assert not cache.is_warm("a spec")
    cache.note_warm("another")
    assert cache.problem() is None and not cache.is_warm("a spec"), "what the other one compiled counts for nothing"


WAITS = """
import os, sys, time
import torch
from fp8rl.numerics.kernels import cache, swiglu
from fp8rl.numerics.kernels.precompile import META, address
from tests.support.hopper import compiled_only
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
cache.watch()
torch.Tensor.data_ptr = address
print("ready", flush=True)
sys.stdin.readline()
with compiled_only():
    swiglu.swiglu(torch.empty(64, 256, dtype=torch.bfloat16, device=META))
"""


def test_two_processes_do_not_compile_a_kernel_twice(tmp_path: Path) -> None:
    environment = compiling() | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command, pipe = [sys.executable, "-W", "ignore", "-c", WAITS], subprocess.PIPE
    both = [subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for each in both:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    said = [line for each in both for line in each.communicate("\n")[0].splitlines()]
    assert sum(line.startswith("kernels: compiled ") for line in said) == 1, said


def test_a_start_goes_on_where_its_kernels_cannot_be_compiled_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("kernels: found no list of what this spec launches: a traceback")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "_recorded", fails)
    said: list[str] = []
    kernels.warm_once(None, (9, 0), said.append)
    assert said[-1].startswith(
        "kernels: not compiled beforehand, but each when it is first launched; kernels: found no"
    )
    with pytest.raises(RuntimeError, match="no list"):
        kernels.warm(None, (9, 0), said.append)
