"""The Ray cluster of a run: the one that RAY_ADDRESS names, or a private one that ends with the run."""

from __future__ import annotations

import logging
import os
import secrets
import select
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from fp8rl.numerics.core.errors import UserError, say_error, user_error
from fp8rl.rl.run.interrupts import STOPPED, bounded
from fp8rl.rollout.deadlines import kill_family
from fp8rl.rollout.engine.server.scratch import RAY, make_scratch, remove_scratch, sweep
from fp8rl.rollout.loopback import reach_loopback

_PARENT = "/tmp"
"""Parent of a private cluster's folder. It is short, because paths of sockets must be short."""
_ANSWER_SECONDS = 5.0
_END_SECONDS = 120.0
_HEAD = {ray_constants.PROCESS_TYPE_RAYLET: "raylet", ray_constants.PROCESS_TYPE_GCS_SERVER: "GCS server"}
"""The processes without which a cluster of one node cannot go on, by Ray's names for them."""


def end_at_once(why: str) -> None:
    """Print why, and end this process: without Ray nothing can be unwound. Its children end with it."""
    say_error(f"error: {why}")
    os._exit(STOPPED)


@contextmanager
def ray_cluster(failure_logs: Path, lost: Callable[[str], object] = end_at_once) -> Iterator[None]:
    """Join the cluster of RAY_ADDRESS (`ray job submit` sets it); otherwise start a private cluster for the block.

    No other cluster that runs on this machine is joined, so that two runs stay apart. A private cluster listens only on
    loopback, and requires a token, which is in a folder that no other user can enter. Its logs are kept in
    `failure_logs` only if the block fails.

    lost: called in another thread, with the reason, if a private cluster has lost its head. It has to end this process:
    Ray does so too, a moment later or after a minute of retries, with messages of its own.
    Raises UserError: RAY_ADDRESS names no cluster that lets this process in.
    """
    reach_loopback()  # also of the processes that Ray starts
    # Ray would otherwise hide the GPUs from an actor that asks for none, and warn about it for each.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's own niceness, 15, would have the trainer wait for whatever else runs on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    address = os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        yield
    elif address:
        _check_answers(address)
        try:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    _init(Path(folder), address=address)
                except (ConnectionError, RuntimeError, AuthenticationError) as error:  # another version, or token
                    raise _no_cluster(address, _last_words(error.__context__ or error)) from None
            yield
        finally:
            _shut_down()
    else:
        with _private_cluster(failure_logs, lost):
            yield


def _check_answers(address: str) -> None:
    """Check that a gRPC server answers at `address`. Ray itself would try for two minutes, and then end the process."""
    if not address.rpartition(":")[2].isdigit():
        return  # "auto": Ray looks for a cluster of this machine
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(_ANSWER_SECONDS)
        except grpc.FutureTimeoutError:
            found = f"no answer of Ray's within {_ANSWER_SECONDS:g} s; its dashboard is for `fp8rl submit`"
            raise _no_cluster(address, found) from None


def _last_words(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1].partition(". ")[0]


def _no_cluster(address: str, found: str) -> UserError:
    return user_error(
        "RAY_ADDRESS",
        found=f"{address} ({found})",
        expected="the head of a Ray cluster of this version, which answers and lets this process in",
        remedy="Correct the address, such as 10.0.0.1:6379, start a cluster with `ray start --head`, or unset "
        "RAY_ADDRESS. If the cluster asks for a token, put the token and RAY_AUTH_MODE into this environment too.",
    )


@contextmanager
def _private_cluster(failure_logs: Path, lost: Callable[[str], object]) -> Iterator[None]:
    sweep(RAY, _PARENT)
    folder, lock = make_scratch(RAY, _PARENT)
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    # The token is in a file, since every child inherits the environment. Without this path Ray would write a token into
    # the user's home, and any cluster started later would ask for it.
    settings: dict[str, str | None] = {"RAY_AUTH_TOKEN": None, "RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN_PATH": str(token)}
    # Ray kills its workers at the end, so their temporary folders (torch, wandb) have to go with the cluster's folder.
    # This process does not use it: torch would keep shared memory in a folder that the end of the cluster removes.
    for_workers: dict[str, str | None] = {"TMPDIR": str(folder / "tmp")}
    (folder / "tmp").mkdir()
    settings["RAY_enable_metrics_collection"] = "0"
    # Each actor has its own environment, so none would use the worker that Ray starts beforehand.
    settings["RAY_prestart_worker_first_driver"] = "0"
    # With this setting, meant for machines whose firewall asks the user, all of Ray listens on loopback.
    settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        with _environment(settings):
            try:
                with _environment(for_workers), _lean_head():
                    _start(folder, address="local", include_dashboard=False, _temp_dir=str(folder / "ray"))
                with _head_watched(lost):
                    yield
            except Exception:
                _shut_down(wait_for_processes=True)
                logs = folder / "ray" / "session_latest" / "logs"
                if logs.is_dir() and failure_logs.parent.is_dir():
                    with suppress(OSError):  # of a full disk, which may be what ended the block
                        shutil.copytree(logs, failure_logs, dirs_exist_ok=True)
                raise
            finally:
                _shut_down(wait_for_processes=True)
    finally:
        remove_scratch(folder)
        os.close(lock)


@contextmanager
def _head_watched(lost: Callable[[str], object]) -> Iterator[None]:
    """Call `lost` for the first of the head's processes that ends inside the block."""
    processes = ray._private.worker._global_node.all_processes
    names = {os.pidfd_open(info.process.pid): name for kind, name in _HEAD.items() for info in processes[kind]}
    over, end = os.pipe()

    def watch() -> None:
        ready, _, _ = select.select([*names, over], [], [])
        if over not in ready:
            lost(f"found Ray's {names[ready[0]]} ended (killed, or out of memory?), expected it to outlive the run")

    thread = threading.Thread(target=watch, name="ray-head", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(end)
        thread.join()
        for descriptor in (*names, over):
            os.close(descriptor)


@contextmanager
def _environment(settings: dict[str, str | None]) -> Iterator[None]:
    """Set environment variables (None: remove) for this process, and for children that it starts, inside the block."""
    former = {name: os.environ.get(name) for name in settings}
    clustered = ray_constants.ENABLE_RAY_CLUSTER  # read from the environment when Ray was imported
    _set(settings)
    ray_constants.ENABLE_RAY_CLUSTER = False
    AuthenticationTokenLoader.instance().reset_cache()  # it holds another token if this process has used Ray before
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clustered
        _set(former)
        Config.initialize("")  # or a later client of another cluster would be asked for a token
        AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _lean_head() -> Iterator[None]:
    """Have Ray's agent listen at any free port: its default port is one per machine, and a head without the agent takes
    no jobs. Leave out three processes, which cost seconds at each start: the reader of workers' logs, the autoscaler,
    and a dashboard that would have only usage statistics."""
    parameters, services = ray._private.parameter.RayParams, ray._private.services
    start_dashboard = services.start_api_server
    ray._private.parameter.RayParams = partial(
        parameters, dashboard_agent_listen_port=0, include_log_monitor=False, no_monitor=True
    )
    services.start_api_server = lambda *_, **__: ("", None)  # its address and its process
    try:
        yield
    finally:
        ray._private.parameter.RayParams, services.start_api_server = parameters, start_dashboard


def _shut_down(**options: Any) -> None:
    with bounded("Ray", _END_SECONDS):
        ray.shutdown(**options)


def _set(variables: dict[str, str | None]) -> None:
    for name in variables:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in variables.items() if value is not None})


def _start(folder: Path, **options: Any) -> None:
    """Start Ray, and retry once: on a busy machine its processes may not come up within Ray's 30 seconds. Raises
    UserError: Ray has not started the second time either."""
    own = psutil.Process()
    for last in (False, True):
        before = own.children()
        try:
            return _init(folder, **options)
        except Exception as error:
            for process in set(own.children()).difference(before):  # Ray would leave them until this process ends
                psutil.wait_procs(kill_family(process.pid), timeout=_ANSWER_SECONDS)
            if type(error) not in (Exception, RuntimeError, TimeoutError, ConnectionError):  # those of a slow start
                raise
            why = _last_words(error)
        if last:
            raise user_error(
                "Ray",
                found=f"no start, twice ({why})",
                expected="its processes to come up within 30 s",
                remedy="Try again when this machine is less busy, or end other programs on it.",
            )
        logging.getLogger(__name__).warning("Ray has not started (%s): one more try", why)


def _init(folder: Path, **options: Any) -> None:
    """Call `ray.init`, and undo two of its side effects.

    It replaces our handler of SIGTERM by one that exits. It also has workers import from the current directory, where a
    folder `trainer` or a `random.py` would shadow modules; so `folder` is the current directory during the call.
    """
    handler, here = signal.getsignal(signal.SIGTERM), Path.cwd()
    os.chdir(folder)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit:
        raise KeyboardInterrupt from None
    except ValueError as error:
        if "memory" not in str(error):
            raise
        raise user_error(
            "memory",
            found=f"{psutil.virtual_memory().available / 1e9:.1f} GB free, with which Ray does not start ({error})",
            expected="a machine with room for Ray, a trainer and an engine",
            remedy="End other programs, or raise the limit of this container.",
        ) from None
    finally:
        os.chdir(here)
        signal.signal(signal.SIGTERM, handler)
