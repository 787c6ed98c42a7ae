"""Command-line arguments and environment of one SGLang server: the one place that knows CPU from CUDA."""

from __future__ import annotations

import getpass
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollout.config import RolloutConfig
from rollout.plugin import CONFIG_VARIABLE

PLUGIN = "fp8rl"
"""Name of our `sglang.srt.plugins` entry point."""

_CPU_ARGUMENTS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    "--sleep-on-idle",  # without it the idle scheduler burns a core
    "--disable-overlap-schedule",  # there is no device to overlap with; 6% faster without
]


def has_cuda() -> bool:
    """Whether engines of this machine run on a GPU."""
    return torch.cuda.is_available()


def server_arguments(
    model_path: Path,
    config: RolloutConfig,
    *,
    port: int,
    seed: int,
    weight_version: int,
    cuda: bool,
    routes: bool = False,
) -> list[str]:
    """Arguments of `sglang.launch_server`, without the keys: token ids in and out, loopback only.

    routes: record each token's experts, for requests that ask for them.
    """
    arguments = [
        *("--model-path", str(model_path), "--dtype", "bfloat16", "--skip-tokenizer-init"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--context-length", str(config.context_length), "--max-total-tokens", str(config.max_total_tokens)),
        *("--random-seed", str(seed), "--weight-version", str(weight_version)),
    ]
    if config.chunked_prefill_size is not None:
        arguments += ["--chunked-prefill-size", str(config.chunked_prefill_size)]
    if not config.prefix_cache:
        arguments.append("--disable-radix-cache")
    if routes:
        arguments.append("--enable-return-routed-experts")
    return arguments if cuda else arguments + _CPU_ARGUMENTS


def server_environment(plugin: Mapping[str, Any] | None, scratch: Path, *, cuda: bool) -> dict[str, str]:
    """Environment of the server: ours, with our plugin and no other (`plugin` None: no plugin at all).

    scratch: directory for the server's sockets and temporary files.
    """
    environment = {
        **os.environ,
        "SGLANG_PLUGINS": PLUGIN if plugin is not None else "none",
        "TMPDIR": str(scratch),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",  # model paths are directories
        "PYTHONWARNINGS": "ignore",
        # A file to meet at: torch's TCP store would listen on every interface.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    environment.pop(CONFIG_VARIABLE, None)
    if plugin is not None:
        environment[CONFIG_VARIABLE] = json.dumps(plugin)
    if not cuda:
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        # What torch.compile made outlives the server, whose scratch directory does not.
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    return environment
