"""Arguments and environment of a server as data, for each device and mode, and as SGLang parses them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from fp8rl.rollout.config import GRAPH_BATCHES, RolloutSection
from fp8rl.rollout.engine.plugin import CONFIG_VARIABLE
from fp8rl.rollout.engine.server.arguments import server_arguments, server_environment
from fp8rl.rollout.types import IDLE_S, NO_WEIGHTS
from tests.support.paths import EXAMPLES

CASES = [(cuda, mode) for cuda in (False, True) for mode in ("exact", "native")]


def arguments_for(config: RolloutSection, *, cuda: bool = False, mode: str = "exact", **options: Any) -> list[str]:
    given = {"port": 4000, "weight_version": NO_WEIGHTS, **options}
    return server_arguments(EXAMPLES / "models/tiny_qwen3_moe", config, cuda=cuda, mode=mode, **given)


@pytest.mark.parametrize(("cuda", "mode"), CASES)
def test_sglang_parses_what_is_asked_for(cuda: bool, mode: str) -> None:
    server_args = pytest.importorskip("sglang.srt.server_args")
    sizes: dict[str, Any] = {"context_length": 300, "max_total_tokens": 4096, "max_running_requests": 32}
    sizes["chunked_prefill_size"] = 96
    config = RolloutSection(**sizes, prefix_cache=False, memory_fraction=0.6, graph_batches=(1, 8, 32), sleep=True)
    options: dict[str, Any] = {"routes": True, "kv": "fp8"}
    parsed = server_args.prepare_server_args(arguments_for(config, cuda=cuda, mode=mode, **options))
    exact = cuda and mode == "exact"
    expected = sizes | {"host": "127.0.0.1", "port": 4000, "dtype": "bfloat16", "base_gpu_id": 0}
    expected |= {"skip_tokenizer_init": True, "random_seed": 0, "weight_version": "-1", "watchdog_timeout": 1200.0}
    expected |= {"grammar_backend": "none", "disable_shared_experts_fusion": True, "disable_radix_cache": True}
    expected |= {"max_mamba_cache_size": 32, "mamba_ssm_dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}
    expected |= {"enable_return_routed_experts": True, "load_format": "dummy", "device": None if cuda else "cpu"}
    expected |= {
        "attention_backend": "triton" if exact else None if cuda else "torch_native",
        "sampling_backend": None if cuda and not exact else "pytorch",
        "moe_runner_backend": "triton" if cuda else "auto",
        "fp8_gemm_runner_backend": "triton" if exact else "auto",
        "bf16_gemm_backend": "torch" if exact else "auto",
        "mem_fraction_static": 0.6 if cuda else None,
        "cuda_graph_bs_decode": [1, 8, 32] if cuda else None,
        "triton_attention_split_tile_size": 300 if exact else None,
    }
    expected |= {"enable_memory_saver": cuda, "disable_overlap_schedule": not cuda, "disable_prefill_cuda_graph": exact}
    assert {name: getattr(parsed, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "graphs", "running"),
    [
        ({}, GRAPH_BATCHES, 256),
        ({"max_running_requests": 40}, (1, 2, 4, 8, 16, 32, 40), 40),
        ({"max_running_requests": 1000}, GRAPH_BATCHES, 256),
        ({"max_running_requests": 48, "graph_batches": (4, 16)}, (4, 16), 16),
    ],
)
def test_no_batch_is_larger_than_the_largest_graph(config: dict, graphs: tuple[int, ...], running: int) -> None:
    rollout = RolloutSection(**config)
    line = " ".join(arguments_for(rollout, cuda=True))
    assert rollout.graphs == graphs and f"--max-running-requests {running} " in line
    assert f"--cuda-graph-bs-decode {' '.join(map(str, graphs))} --" in line


def test_a_graph_of_a_batch_that_never_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="found graph_batches up to 64 with max_running_requests=32"):
        RolloutSection(max_running_requests=32, graph_batches=(1, 64))


def test_an_engine_that_sleeps_has_its_graphs_in_regions_of_torch_memory_saver(tmp_path: Path) -> None:
    for cuda, sleep, expected in ((True, True, "1"), (True, False, None), (False, True, None)):
        found = server_environment(None, tmp_path, cuda=cuda, sleep=sleep)
        assert found.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == expected


@pytest.mark.parametrize(("cuda", "mode"), CASES)
def test_sglang_reads_the_variables_of_a_device_and_mode(tmp_path: Path, cuda: bool, mode: str) -> None:
    source = inspect.getsource(pytest.importorskip("sglang.srt.environ"))
    environment = server_environment({"numerics": {"mode": mode}}, tmp_path, cuda=cuda, mode=mode)
    for name, on_gpus in (
        ("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "0"),
        ("SGLANG_ENABLE_JIT_DEEPGEMM", "0" if mode == "exact" else None),
        ("SGLANG_FORCE_COARSE_WAR_BARRIER", "1" if mode == "exact" else None),
        ("SGLANG_JIT_DEEPGEMM_PRECOMPILE", None if mode == "exact" else "0"),
    ):
        assert f"    {name} = EnvBool(" in source and environment.get(name) == (on_gpus if cuda else None)
    assert environment.get("SGLANG_USE_CPU_ENGINE") == (None if cuda else "1")
    assert environment["OMP_NUM_THREADS"] == "1" and environment["TMPDIR"] == str(tmp_path)
    assert int(environment["SGLANG_TIMEOUT_KEEP_ALIVE"]) >= 2 * IDLE_S, "a client ends an idle connection first"


def test_environment_restricts_the_plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "of another run")
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    stock = server_environment(None, tmp_path, cuda=False)
    assert stock["SGLANG_PLUGINS"] not in ("", "fp8rl", "another") and CONFIG_VARIABLE not in stock
    ours = server_environment({"spec": "é"}, tmp_path, cuda=False)
    assert ours["SGLANG_PLUGINS"] == "fp8rl" and "spec" in ours[CONFIG_VARIABLE]
