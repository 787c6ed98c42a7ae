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
from fp8rl.rl.run.cluster.cluster import ray_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCRIPT = """
import sys
from pathlib import Path
import fp8rl.trainer, psutil, ray
from fp8rl.rl.run.cluster.cluster import ray_cluster

def all_on_loopback(family):
    addresses = {c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert addresses, "there are servers"
    return addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

logs = Path(sys.argv[1])
for failing in (False, True):
    try:
        with ray_cluster(logs):
            family = psutil.Process().children(recursive=True)
            names = {process.name() for process in family}
            assert {"gcs_server", "raylet"} <= names, names
            folder = Path(ray._private.worker._global_node.get_temp_dir_path())
            assert folder.is_dir()
            where = ray.get(ray.remote(num_cpus=0)(lambda: __import__("fp8rl.trainer").trainer.__file__).remote())
            assert where == fp8rl.trainer.__file__, where
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
    assert logs.is_dir() == failing
assert (logs / "raylet.out").is_file()
"""


AFTER_ANOTHER = """
import sys
from pathlib import Path
import ray
from fp8rl.rl.run.cluster.cluster import ray_cluster

ray.init(address="local", include_dashboard=False)
ray.shutdown()
with ray_cluster(Path(sys.argv[1])):
    assert ray.get(ray.remote(num_cpus=0)(lambda: 3).remote()) == 3
"""

HEADLESS = """
import sys, time
from pathlib import Path
import psutil
from fp8rl.rl.run.cluster.cluster import ray_cluster

with ray_cluster(Path(sys.argv[1])):
    (head,) = [child for child in psutil.Process().children(recursive=True) if child.name() == "gcs_server"]
    head.kill()
    time.sleep(30)
"""

SLOW = """
import itertools, sys, time, types
from pathlib import Path
import psutil, ray
import ray._private.node as node
import ray._private.services as services
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.run.cluster.cluster import ray_cluster

clock, known, slow = itertools.count(0, 40), services.get_node, [True] * 3
node.time = types.SimpleNamespace(**vars(time) | {"monotonic": lambda: next(clock)})

def get_node(*arguments):
    if slow:
        slow.pop()
        raise RuntimeError("the raylet is not there yet")
    return known(*arguments)

services.get_node = get_node
try:
    with ray_cluster(Path(sys.argv[1])):
        pass
except UserError as error:
    print(error, file=sys.stderr)
left = psutil.Process().children(recursive=True)
assert len(slow) == 1 and not left, (slow, left)
with ray_cluster(Path(sys.argv[1])):
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    assert names.count("raylet") == names.count("gcs_server") == 1, names
    assert ray.get(ray.remote(num_cpus=0)(lambda: 3).remote()) == 3
"""

WITHOUT_MEMORY = """
import sys
from pathlib import Path
import ray
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.run.cluster.cluster import ray_cluster

ray._private.utils.estimate_available_memory = lambda: 120_000_000
try:
    with ray_cluster(Path(sys.argv[1])):
        pass
except UserError as error:
    print(error, file=sys.stderr)
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


def test_it_starts_in_a_process_that_has_used_another_token(tmp_path: Path, run: Callable[..., str]) -> None:
    run(AFTER_ANOTHER)
    assert (tmp_path / "home" / ".ray" / "auth_token").is_file(), "Ray's own, of the first cluster"


def test_it_ends_with_the_block_and_keeps_its_logs_only_after_a_failure(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    run(SCRIPT)
    assert not (tmp_path / "home" / ".ray").exists(), "a token there would lock `ray job submit` out of other clusters"


@pytest.mark.parametrize("kind", ["nobody", "a web server", "a word"])
def test_an_address_that_does_not_answer_is_one_message_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = {"nobody": "127.0.0.1:9", "a web server": f"127.0.0.1:{server.server_port}", "a word": "nowhere:6379"}
    monkeypatch.setenv("RAY_ADDRESS", address[kind])
    began = time.monotonic()
    with pytest.raises(UserError, match=f"RAY_ADDRESS: found .{address[kind]} .*start one with `ray start --head`"):
        with ray_cluster(tmp_path):
            pass
    assert time.monotonic() - began < 10, "Ray itself takes two minutes"
    server.shutdown()


def test_too_little_memory_for_ray_is_one_sentence_and_leaves_nothing(run: Callable[..., str]) -> None:
    before = set(Path("/tmp").glob("fp8rl-ray-*"))
    (said,) = run(WITHOUT_MEMORY).splitlines()
    assert said.startswith("memory: found ") and "Ray does not start" in said and "End other programs" in said
    assert not set(Path("/tmp").glob("fp8rl-ray-*")) - before


def test_a_head_that_is_killed_ends_the_process_in_one_sentence(run: Callable[..., str]) -> None:
    """At once, and not after the minute in which Ray looks for it."""
    assert run(HEADLESS, code=3).splitlines()[-1].startswith("error: found Ray's GCS server ended (killed, ")


def test_ray_that_does_not_come_up_in_time_has_one_more_try_and_is_then_one_sentence(run: Callable[..., str]) -> None:
    """The first cluster of the script fails twice and leaves no process, the second one once."""
    said = [line for line in run(SLOW).splitlines() if "one more try" not in line]
    (sentence,) = [line for line in said if line.startswith("Ray: found ")]
    assert "no start, twice (The current node timed out during startup)" in sentence
    assert "Try again when this machine is less busy" in sentence and "Traceback" not in "".join(said)
