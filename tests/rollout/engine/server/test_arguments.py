"""Arguments and environment of a server as data, for each device and mode, and as SGLang parses them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from fp8rl.rollout.config import GRAPH_BATCHES, RolloutSection
from fp8rl.rollout.engine.plugin import CONFIG_VARIABLE
from fp8rl.rollout.engine.server.arguments import server_arguments, server_environment
from fp8rl.rollout.types import IDLE_S
from tests.support.paths import EXAMPLES

COMMON = (
    "--model-path m --dtype bfloat16 --skip-tokenizer-init --host 127.0.0.1 --port 4000 --log-level warning "
    "--grammar-backend none --disable-shared-experts-fusion --context-length 1024 --max-total-tokens 32768 "
    "--random-seed 0 --weight-version 2 --watchdog-timeout 1200.0"
)
CPU = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --sleep-on-idle "
    "--disable-overlap-schedule"
)
STATES = "--max-mamba-cache-size {} --mamba-ssm-dtype float32"
GRAPHS = "--cuda-graph-bs-decode 1 2 4 8 16 32 64 96 128 192 256"
EXACT = (
    "--attention-backend triton --sampling-backend pytorch --moe-runner-backend triton "
    "--fp8-gemm-backend triton --bf16-gemm-backend torch --disable-prefill-cuda-graph"
)
NATIVE = "--moe-runner-backend triton"
DEVICES = {(False, "exact"): CPU, (False, "native"): CPU, (True, "exact"): EXACT, (True, "native"): NATIVE}
CASES = [(cuda, mode, extra) for (cuda, mode), extra in DEVICES.items()]


def arguments_for(
    config: RolloutSection, *, cuda: bool = False, mode: str = "exact", routes: bool = False, model: Path = Path("m")
) -> list[str]:
    return server_arguments(model, config, port=4000, weight_version=2, cuda=cuda, mode=mode, routes=routes)


@pytest.mark.parametrize(("cuda", "mode", "extra"), CASES)
def test_by_hand(cuda: bool, mode: str, extra: str) -> None:
    split = " --triton-attention-split-tile-size 1024" * (mode == "exact")
    own = f"--max-running-requests 256 {STATES.format(768)} {GRAPHS}{split}" if cuda else STATES.format(192)
    assert " ".join(arguments_for(RolloutSection(), cuda=cuda, mode=mode)) == f"{COMMON} {own} {extra}"


def test_what_the_config_asks_for() -> None:
    config = RolloutSection(context_length=300, max_total_tokens=4096, chunked_prefill_size=96, prefix_cache=False)
    line = " ".join(arguments_for(config, routes=True))
    asked = f"--chunked-prefill-size 96 {STATES.format(64)} --disable-radix-cache --enable-return-routed-experts"
    expected = COMMON.replace("1024", "300").replace("32768", "4096")
    assert line == f"{expected} {asked} {CPU}"


def test_a_cache_of_codes_is_asked_for() -> None:
    line = server_arguments(Path("m"), RolloutSection(), port=4000, weight_version=2, cuda=False, kv="fp8")
    assert " ".join(line) == f"{COMMON} --kv-cache-dtype fp8_e4m3 {STATES.format(192)} {CPU}"


def test_an_engine_without_weights_makes_some_up() -> None:
    line = server_arguments(Path("m"), RolloutSection(), port=4000, weight_version=2, cuda=False, dummy=True)
    assert " ".join(line) == f"{COMMON} --load-format dummy {STATES.format(192)} {CPU}"


def test_memory_keys_are_a_gpus_but_for_the_number_of_answers() -> None:
    config = RolloutSection(memory_fraction=0.6, max_running_requests=32, graph_batches=(1, 8, 32))
    assert " ".join(arguments_for(config)) == f"{COMMON} --max-running-requests 32 {STATES.format(96)} {CPU}"
    keys = f"--max-running-requests 32 {STATES.format(96)} --mem-fraction-static 0.6 --cuda-graph-bs-decode 1 8 32"
    keys += " --triton-attention-split-tile-size 1024"
    assert " ".join(arguments_for(config, cuda=True)) == f"{COMMON} {keys} {EXACT}"


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


def test_an_engine_that_sleeps_has_its_memory_on_a_gpu_in_regions_of_torch_memory_saver(tmp_path: Path) -> None:
    config, graphs = RolloutSection(sleep=True), "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    assert arguments_for(config) == arguments_for(RolloutSection())
    more = set(arguments_for(config, cuda=True)) - set(arguments_for(RolloutSection(), cuda=True))
    assert more == {"--enable-memory-saver"}
    for cuda, sleep, expected in ((True, True, "1"), (True, False, None), (False, True, None)):
        assert server_environment(None, tmp_path, cuda=cuda, sleep=sleep).get(graphs) == expected


@pytest.mark.parametrize(("cuda", "mode", "extra"), CASES)
def test_sglang_knows_every_argument(cuda: bool, mode: str, extra: str) -> None:
    server_args = pytest.importorskip("sglang.srt.server_args")
    model = EXAMPLES / "models/tiny_qwen3_moe"
    config = RolloutSection(
        chunked_prefill_size=96, prefix_cache=False, memory_fraction=0.6, graph_batches=(1, 8), sleep=True
    )
    parsed = server_args.prepare_server_args(arguments_for(config, cuda=cuda, mode=mode, routes=True, model=model))
    assert (parsed.random_seed, parsed.weight_version, parsed.max_total_tokens) == (0, "2", 32768)
    assert parsed.chunked_prefill_size == 96 and parsed.disable_radix_cache and parsed.enable_return_routed_experts
    assert parsed.mem_fraction_static == (0.6 if cuda else None)
    assert parsed.cuda_graph_bs_decode == ([1, 8] if cuda else None)
    assert parsed.enable_memory_saver is cuda
    assert parsed.triton_attention_split_tile_size == (1024 if cuda and mode == "exact" else None)
    given = (parsed.device, parsed.attention_backend, parsed.sampling_backend, parsed.moe_runner_backend)
    assert (
        given
        == {
            CPU: ("cpu", "torch_native", "pytorch", "auto"),
            EXACT: (None, "triton", "pytorch", "triton"),
            NATIVE: (None, None, None, "triton"),
        }[extra]
    )
    assert (parsed.base_gpu_id, parsed.disable_overlap_schedule) == (0, not cuda)
    assert parsed.disable_prefill_cuda_graph == (extra == EXACT)
    assert (parsed.fp8_gemm_runner_backend, parsed.bf16_gemm_backend) == (
        ("triton", "torch") if extra == EXACT else ("auto", "auto")
    )


CUDA = {"SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "0", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
OF_A_MODE = ("SGLANG_ENABLE_JIT_DEEPGEMM", "SGLANG_FORCE_COARSE_WAR_BARRIER", "SGLANG_JIT_DEEPGEMM_PRECOMPILE")


def environment_for(scratch: Path, cuda: bool, mode: str) -> dict[str, str]:
    return server_environment({"numerics": {"mode": mode}}, scratch, cuda=cuda, mode=mode)


@pytest.mark.parametrize(
    ("cuda", "mode", "expected"),
    [
        (False, "exact", {"SGLANG_USE_CPU_ENGINE": "1", "GLOO_SOCKET_IFNAME": "lo"}),
        (False, "native", {"SGLANG_USE_CPU_ENGINE": "1", "GLOO_SOCKET_IFNAME": "lo"}),
        (True, "exact", CUDA | {"SGLANG_ENABLE_JIT_DEEPGEMM": "0", "SGLANG_FORCE_COARSE_WAR_BARRIER": "1"}),
        (True, "native", CUDA | {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}),
    ],
)
def test_environment_of_a_device_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool, mode: str, expected: dict[str, str]
) -> None:
    every = {"SGLANG_USE_CPU_ENGINE", "GLOO_SOCKET_IFNAME", *CUDA, *OF_A_MODE}
    for name in every:
        monkeypatch.delenv(name, raising=False)
    environment = environment_for(tmp_path, cuda, mode)
    assert {name: environment[name] for name in every & environment.keys()} == expected
    assert environment["OMP_NUM_THREADS"] == "1" and environment["TMPDIR"] == str(tmp_path)


@pytest.mark.parametrize("name", ["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", *OF_A_MODE])
def test_sglang_reads_the_variables(name: str) -> None:
    environ = pytest.importorskip("sglang.srt.environ")
    assert f"    {name} = EnvBool(" in inspect.getsource(environ)


def test_a_server_keeps_an_idle_connection_for_longer_than_a_client_does(tmp_path: Path) -> None:
    """One that the server closes just when a request is sent takes the request with it."""
    assert int(environment_for(tmp_path, False, "exact")["SGLANG_TIMEOUT_KEEP_ALIVE"]) >= 2 * IDLE_S


def test_environment_restricts_the_plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "of another run")
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    stock = server_environment(None, tmp_path, cuda=False)
    assert stock["SGLANG_PLUGINS"] not in ("", "fp8rl", "another") and CONFIG_VARIABLE not in stock
    ours = server_environment({"spec": "é"}, tmp_path, cuda=False)
    assert ours["SGLANG_PLUGINS"] == "fp8rl" and "spec" in ours[CONFIG_VARIABLE]
