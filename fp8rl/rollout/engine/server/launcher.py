"""The main module of an engine process. It runs SGLang's HTTP server, which never outlives its owner (`Engine`).

Standard input is the lifeline. Its first line is a JSON object with the server's arguments and keys. So they appear
neither in the process list nor in the environment. Then the pipe stays open. When the owner closes it or dies, the
kernel ends the stream, and the watch kills the whole process group. The watch is a separate process. So it works also
if the server is stopped, or is killed before its workers have asked for its death signal. (PR_SET_PDEATHSIG in the
server would not do. It fires when the *thread* that started the process ends, and threads of a Ray actor come and go.)
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from fp8rl.rollout.engine.plugin.hooks import register
from fp8rl.rollout.engine.server import public
from fp8rl.rollout.engine.server.processes import kill_group
from fp8rl.rollout.engine.server.scratch import remove_scratch

ENDPOINTS = {
    "/generate", "/model_info", "/pause_generation", "/continue_generation", "/flush_cache", "/weights_checker",
    "/update_weight_version", "/update_weights_from_disk", "/init_weights_update_group", "/v1/loads", "/freeze_gc",
    "/destroy_weights_update_group", "/release_memory_occupation", "/resume_memory_occupation",
}  # fmt: skip
"""The endpoints that `server.client` uses, and /freeze_gc, which SGLang itself calls at the end of a start. After this
call the garbage collector skips the objects of imports, which would take 0.3 s in each flush of a sync."""


def main() -> None:
    """Serve until SIGTERM, or until standard input ends."""
    with open(0, "rb", buffering=0, closefd=False) as lifeline:  # so that nothing after the line is buffered away
        line = lifeline.readline()
    if not line.endswith(b"\n"):
        raise SystemExit(
            "The launcher is started by fp8rl.rollout.engine.engine, which writes one JSON line to its input"
        )
    request = json.loads(line)
    host = request["arguments"][request["arguments"].index("--host") + 1]
    if not host.startswith("127.") and not (request["api_key"] and request["admin_api_key"]):
        raise SystemExit(
            f"engine: found fewer than two keys for an engine at {host}, expected one for generation and one for "
            "administration, because without keys anybody could replace its weights. Give it both, or 127.0.0.1"
        )
    start_watch()
    # Until the first request SGLang does not handle SIGTERM, and the `finally` below would be skipped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    _import_one_model_only(request["model_type"])
    # SGLang's dumper of tensors would import it, and wandb with it: a twelfth of a start.
    sys.modules["megatron"] = None  # type: ignore[assignment]

    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog", _exit_promptly, HookType.AROUND
    )
    HookRegistry.register("sglang.srt.server_args.PortArgs.init_new", _name_shared_memory, HookType.AFTER)
    if request["fork"]:
        HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER)
    if request["openai"]:
        register(public.HOOKS)
    load_plugins()
    arguments = prepare_server_args(request["arguments"])
    arguments.api_key, arguments.admin_api_key = request["api_key"], request["admin_api_key"]

    from sglang.srt.entrypoints import http_server

    _close_all_but(ENDPOINTS | public.ENDPOINTS if request["openai"] else ENDPOINTS)
    if request["openai"]:
        public.list_models(http_server.app, lambda: http_server.get_global_state().tokenizer_manager)
    try:
        http_server.launch_server(arguments, execute_warmup_func=_wait_until_listening)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
        remove_scratch(Path(os.environ["TMPDIR"]))


def start_watch() -> None:
    """Fork the watch. When the lifeline or this process ends, it kills the process group, then removes the group's
    files."""
    server, ended = os.getpid(), os.pidfd_open(os.getpid())
    if os.fork():
        return
    try:
        os.setpgid(0, 0)  # it survives its own kill
        setproctitle("fp8rl::watch")
        select.select([0, ended], [], [])
    finally:
        kill_group(server, Path(os.environ["TMPDIR"]))
    os._exit(0)


def _name_shared_memory(ports: Any, *_: Any, **__: Any) -> None:
    """Name the only file that SGLang makes outside its scratch directory, and never removes, after the directory."""
    ports.instance_id = Path(os.environ["TMPDIR"]).name


def _import_one_model_only(model_type: str) -> None:
    """Let SGLang import only the module of this model. All modules take a second and fill the log.

    Most of SGLang's modules have the `model_type` of config.json as name. If none has, SGLang imports all.
    """
    models = Path(importlib.util.find_spec("sglang").submodule_search_locations[0], "srt", "models")  # type: ignore[union-attr, index]
    modules = {path.stem for path in models.glob("*.py")}
    if model_type in modules:
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(modules - {model_type})


async def _exit_promptly(original: Any, manager: Any) -> None:
    """Look for a SIGTERM ten times a second, then let SGLang drain and exit. SGLang itself looks every five seconds.

    Its `sys.exit` would go through the server's event loop, which would log a traceback.
    """
    while not manager.gracefully_exit:
        await asyncio.sleep(0.1)
    try:
        await original(manager)
    except SystemExit as ended:
        remove_scratch(Path(os.environ["TMPDIR"]))
        os._exit(int(ended.code or 0))


def _fork(result: None, *_: Any) -> None:
    """Let SGLang fork its scheduler and detokenizer. Spawned processes would import SGLang again. Not for CUDA."""
    multiprocessing.set_start_method("fork", force=True)


def _close_all_but(endpoints: set[str]) -> None:
    """Close all of SGLang's ninety endpoints except these.

    Some others show secrets (/server_info shows the administration key). Others would give sessions, schemas and
    documentation to everybody with the generation key.
    """
    from sglang.srt.entrypoints import http_server

    routes = http_server.app.router.routes
    # FastAPI keeps a router that was included in another as one entry.
    every = [inner for route in routes for inner in getattr(getattr(route, "original_router", None), "routes", [route])]
    kept = [route for route in every if getattr(route, "path", "") in endpoints]
    missing = endpoints - {route.path for route in kept}
    if missing:
        raise RuntimeError(
            f"found no endpoint {', '.join(sorted(missing))} in SGLang, expected it. Install the locked version"
        )
    routes[:] = kept


def _wait_until_listening(arguments: Any) -> bool:
    """Wait until the port is open, and declare the server up. SGLang's own warm-up sleeps a second and generates."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    for _ in range(1200):
        with socket.socket() as probe:
            if probe.connect_ex((arguments.host, arguments.port)) == 0:
                get_global_state().tokenizer_manager.server_status = ServerStatus.Up
                return True
        time.sleep(0.05)
    return False


if __name__ == "__main__":
    main()
