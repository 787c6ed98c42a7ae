"""Makes the command-line arguments and the environment of an SGLang server, for a CPU or for GPUs."""

from __future__ import annotations

import getpass
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8rl.numerics.backend.implementation import BOUNDED_MEMORY
from fp8rl.numerics.config import KVPrecision, Mode
from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.plugin import CONFIG_VARIABLE
from fp8rl.rollout.types import IDLE_S, NO_WEIGHTS

_SECRETS = ("RAY_AUTH_TOKEN", "WANDB_API_KEY", "FP8RL_API_KEY")
"""Environment variables with keys. An engine does not need them, so it does not get them."""

PLUGIN = "fp8rl"
"""Name of our entry point in the group `sglang.srt.plugins`."""

_CPU_ARGUMENTS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    "--sleep-on-idle",  # without it the idle scheduler burns a core
    "--disable-overlap-schedule",  # there is no device to overlap with; 6% faster without
)

_CUDA_ARGUMENTS: dict[Mode, tuple[str, ...]] = {
    # The backends whose methods the plugin replaces. Decoding runs in CUDA graphs. Graphs of prefill would pad it and
    # cut it in pieces around attention.
    "exact": (
        *("--attention-backend", "triton"),
        *("--sampling-backend", "pytorch"),
        *("--moe-runner-backend", "triton"),
        *("--fp8-gemm-backend", "triton"),
        *("--bf16-gemm-backend", "torch"),
        "--disable-prefill-cuda-graph",
    ),
    # SGLang's choice, except the experts' runner: triton takes activations as the plugin quantizes them.
    "native": ("--moe-runner-backend", "triton"),
}

_CUDA_ENVIRONMENT = {
    # Interleaved, the rows of an expert's gate and up are not the checkpoint's.
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "0",
    # As in the trainer: the two ends of a broadcast of weights must share memory in one way.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}

_CUDA_ENVIRONMENT_OF: dict[Mode, dict[str, str]] = {
    "exact": {
        # DeepGEMM would compile its kernels at the start, and no product runs on it.
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        # Our attention reads the table of slots inside the CUDA graph. SGLang's copies it before, and takes that for
        # the last read: the scheduler would write to the table while the graph runs.
        "SGLANG_FORCE_COARSE_WAR_BARRIER": "1",
    },
    # DeepGEMM compiles a kernel when it is first called, and not for every number of tokens at the start (10 to 20
    # minutes, by its own log).
    "native": {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"},
}


@dataclass(frozen=True)
class ServedChats:
    """The settings of a server's OpenAI API."""

    name: str
    """The model's name."""
    tool_parser: str | None = None
    """SGLang's name of the format of tool calls."""
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, for requests without them."""

    def arguments(self) -> list[str]:
        """Return the arguments of `sglang.launch_server` for these settings."""
        found = ["--served-model-name", self.name, "--enable-cache-report"]
        if self.tool_parser is not None:
            found += ["--tool-call-parser", self.tool_parser]
        if self.chat_template:
            found += ["--default-chat-template-kwargs", json.dumps(dict(self.chat_template))]
        return found


def server_arguments(
    model_path: Path,
    config: RolloutSection,
    *,
    host: str = LOOPBACK,
    port: int,
    weight_version: int,
    cuda: bool,
    mode: Mode = "native",
    kv: KVPrecision = "bf16",
    routes: bool = False,
    served: ServedChats | None = None,
) -> list[str]:
    """Return the arguments of `sglang.launch_server`, without the keys.

    weight_version: version of the directory's weights. `NO_WEIGHTS`: it has none, and a sync sends them. kv: the format
    of keys and values. routes: record the experts of each token, for requests that ask for them. On a CPU this needs
    our plugin. served: serve chats and texts with these settings. None: requests are token ids, and no tokenizer is
    loaded.
    """
    arguments = [
        *("--model-path", str(model_path), "--dtype", "bfloat16"),
        *(("--skip-tokenizer-init",) if served is None else served.arguments()),
        *("--host", host, "--port", str(port), "--log-level", "warning"),
        *("--grammar-backend", "none" if served is None else "xgrammar"),
        "--disable-shared-experts-fusion",  # they are no routed experts of the checkpoint
        *("--context-length", str(config.context_length), "--max-total-tokens", str(config.cache_tokens)),
        *("--random-seed", "0", "--weight-version", str(weight_version)),
        *("--watchdog-timeout", str(config.longest_pass_s)),  # its own would end a server in a pass of 300 s
    ]
    if kv == "fp8":
        arguments += ["--kv-cache-dtype", "fp8_e4m3"]
    if weight_version == NO_WEIGHTS:
        arguments += ["--load-format", "dummy"]
    if config.chunked_prefill_size is not None:
        arguments += ["--chunked-prefill-size", str(config.chunked_prefill_size)]
    if (running := config.running(cuda)) is not None:
        arguments += ["--max-running-requests", str(running)]
    # For models that keep a state for each sequence: others have none.
    arguments += ["--max-mamba-cache-size", str(config.states(cuda)), "--mamba-ssm-dtype", "float32"]
    if not config.prefix_cache:
        arguments.append("--disable-radix-cache")
    if routes:
        arguments.append("--enable-return-routed-experts")
    if config.tp > 1:
        # Experts whole: what a rank adds up of one expert's width would be rounded before the others' part comes.
        arguments += ["--tp-size", str(config.tp), "--ep-size", str(config.tp)]
    if not cuda:
        return [*arguments, *_CPU_ARGUMENTS]
    if config.memory_fraction is not None:
        arguments += ["--mem-fraction-static", str(config.memory_fraction)]
    arguments += ["--cuda-graph-bs-decode", *map(str, config.graphs)]
    if mode == "exact":
        # One split of the keys: SGLang's workspace for the splits of its own kernel, which the plugin replaces, would
        # take up to 17 GB.
        arguments += ["--triton-attention-split-tile-size", str(config.context_length)]
    if config.sleep:
        arguments.append("--enable-memory-saver")
    return [*arguments, *_CUDA_ARGUMENTS[mode]]


def server_environment(
    plugin: Mapping[str, Any] | None,
    scratch: Path,
    *,
    host: str = LOOPBACK,
    cuda: bool,
    mode: Mode = "native",
    ranks: int = 1,
    sleep: bool = False,
) -> dict[str, str]:
    """Return the environment of the server: this process's environment, with changes.

    plugin: the configuration of our plugin, which is the only plugin. None: no plugin. scratch: directory for sockets
    and temporary files. ranks: number of tensor-parallel processes. sleep: the server will sometimes release memory.
    """
    environment = {
        **os.environ,
        "SGLANG_PLUGINS": PLUGIN if plugin is not None else "none",
        "TMPDIR": str(scratch),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",  # model paths are directories
        "PYTHONWARNINGS": "ignore",
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(int(10 * IDLE_S)),
        # A file to meet at: torch's TCP store would listen on every interface.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous",
        "NO_PROXY": host,
        "no_proxy": host,
    }
    for name in (CONFIG_VARIABLE, *_SECRETS):
        environment.pop(name, None)
    if plugin is not None:
        environment[CONFIG_VARIABLE] = json.dumps(plugin)
    environment |= BOUNDED_MEMORY
    environment["OMP_NUM_THREADS"] = "1"
    environment |= _CUDA_ENVIRONMENT | _CUDA_ENVIRONMENT_OF[mode] if cuda else {"SGLANG_USE_CPU_ENGINE": "1"}
    if cuda and sleep:
        environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # `--enable-memory-saver` leaves CUDA graphs out
    if not cuda and ranks > 1:
        # By itself SGLang gives each rank a NUMA node, and there may be fewer.
        cores = sorted(os.sched_getaffinity(0))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    if not cuda and host == LOOPBACK:  # gloo would take an interface by the host's name; elsewhere Ray's actor names it
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    # What torch.compile made outlives the server, whose scratch directory does not.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    return environment
