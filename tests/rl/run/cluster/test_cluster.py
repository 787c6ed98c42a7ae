"""A private Ray cluster, in a process of its own since Ray is one per process."""

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.run.cluster import cluster
from fp8rl.rl.run.cluster.cluster import ray_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCRIPT = """
import os, sys
from pathlib import Path
import fp8rl.trainer, psutil, ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from fp8rl.rl.run.cluster.cluster import ray_cluster

def all_on_loopback(family):
    addresses = {c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert addresses, "there are servers"
    return addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

logs, home = Path(sys.argv[1]), Path.home()
for failing in (False, True):
    if failing:  # in a process that has used another token
        assert not (home / ".ray").exists(), "a token there would lock `ray job submit` out of other clusters"
        ray.init(address="local", include_dashboard=False)
        ray.shutdown()
        assert (home / ".ray" / "auth_token").is_file(), "Ray's own"
    asked = is_token_auth_enabled()
    assert asked == failing
    try:
        with ray_cluster(logs):
            assert is_token_auth_enabled()
            family = psutil.Process().children(recursive=True)
            names = {process.name() for process in family}
            assert {"gcs_server", "raylet"} <= names, names
            folder = Path(ray._private.worker._global_node.get_temp_dir_path())
            assert folder.is_dir()
            where = ray.get(ray.remote(num_cpus=0)(lambda: __import__("fp8rl.trainer").trainer.__file__).remote())
            assert where == fp8rl.trainer.__file__, where
            temporary = ray.get(ray.remote(num_cpus=0)(lambda: __import__("os").environ["TMPDIR"]).remote())
            assert Path(temporary).parent == folder.parent and os.environ.get("TMPDIR") != temporary
            if not failing:
                assert all_on_loopback(family)
                ports = {c.laddr.port for p in family for c in p.net_connections("inet")}
                assert 52365 not in ports, "the one that a head beside it listens at"
                assert folder.parent.stat().st_mode & 0o777 == 0o700
                token = (folder.parent / "token").read_text()
                assert not any(token in process.environ().values() for process in family)
            else:
                raise RuntimeError("on purpose")
    except RuntimeError as error:
        assert str(error) == "on purpose"
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, alive
    assert not ray.is_initialized() and not folder.parent.exists()
    assert is_token_auth_enabled() == asked, "clients of other clusters would need a token"
    assert logs.is_dir() == failing
assert (logs / "raylet.out").is_file()
"""

FAULTS = """
import itertools, sys, time, types
from pathlib import Path
import psutil, ray
import ray._private.node as node
import ray._private.services as services
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.run.cluster import cluster
from fp8rl.rl.run.cluster.cluster import ray_cluster

logs, made, make = Path(sys.argv[1]), [], cluster.make_scratch

def make_scratch(*arguments):
    made.append(make(*arguments))
    return made[-1]

cluster.make_scratch = make_scratch

def refused():
    try:
        with ray_cluster(logs):
            pass
    except UserError as error:
        print(error, file=sys.stderr)

known, ray._private.utils.estimate_available_memory = (
    ray._private.utils.estimate_available_memory, lambda: 120_000_000
)
refused()
ray._private.utils.estimate_available_memory = known

clock, known, slow = itertools.count(0, 40), services.get_node, [True] * 3
node.time = types.SimpleNamespace(**vars(time) | {"monotonic": lambda: next(clock)})

def get_node(*arguments):
    if slow:
        slow.pop()
        raise RuntimeError("the raylet is not there yet")
    return known(*arguments)

services.get_node = get_node
refused()
left = psutil.Process().children(recursive=True)
assert len(slow) == 1 and not left, (slow, left)
assert made and not [folder for folder, _ in made if folder.exists()]
with ray_cluster(logs):
    family = psutil.Process().children(recursive=True)
    names = [process.name() for process in family]
    assert names.count("raylet") == names.count("gcs_server") == 1, names
    assert ray.get(ray.remote(num_cpus=0)(lambda: 3).remote()) == 3
    family[names.index("gcs_server")].kill()
    time.sleep(30)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a script says that runs in a new home, `tmp_path / "home"`, and in an environment without Ray's settings."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "fp8rl.py").write_text("raise RuntimeError('of the current directory')")

    def to_the_end(script: str, code: int = 0) -> str:
        command = [sys.executable, "-P", "-c", script, str(tmp_path / "logs")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        return done.stderr

    return to_the_end


def test_it_ends_with_the_block_and_keeps_its_logs_only_after_a_failure(run: Callable[..., str]) -> None:
    """Twice in a process, which has used a cluster with another token between."""
    run(SCRIPT)


@pytest.mark.parametrize("kind", ["nobody", "a web server", "a word"])
def test_an_address_that_is_silent_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    address = {"nobody": "127.0.0.1:9", "a web server": f"127.0.0.1:{server.server_port}", "a word": "nowhere:6379"}
    monkeypatch.setenv("RAY_ADDRESS", address[kind])
    monkeypatch.setattr(cluster, "_ANSWER_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(UserError, match=f"RAY_ADDRESS: found .{address[kind]} .*start a cluster with `ray"):
        with ray_cluster(tmp_path):
            pass
    assert time.monotonic() - began < 10, "Ray itself takes two minutes"
    server.shutdown()


def test_each_fault_of_ray_is_one_sentence(run: Callable[..., str]) -> None:
    """Too little memory for it; a start that fails twice and leaves no process and no folder, and one that fails once;
    at last a head that is killed, which ends the process at once and not after the minute in which Ray looks for it."""
    said = run(FAULTS, code=3).splitlines()
    memory, twice, headless = [line for line in said if "one more try" not in line]
    assert memory.startswith("memory: found ") and "Ray does not start" in memory and "End other programs" in memory
    assert twice.startswith("Ray: found 'no start, twice (The current node timed out during startup)'")
    assert "Try again when this machine is less busy" in twice
    assert headless.startswith("error: found Ray's GCS server ended (killed, ")
