"""Settings of every test: one thread, the same random numbers in every run; without a GPU no GPU tests, and Triton's
kernels in its interpreter.

Processes that tests start find `tests` and `lab` in their environment's path, since product code never looks for
modules in the current directory; they find no folder of the product under a name of its own, as no user does. They
compile nothing: it is half of a start, and the bits are the same. The fixture `compiled` is for tests in which they do.
They look for garbage less often: a tenth of what imports cost is to look through what they have made.
"""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import atexit
import gc
import multiprocessing
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from xdist.scheduler import LoadFileScheduling

torch.set_num_threads(1)
ROOT = Path(__file__).parents[1]
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
if "FP8RL_TESTS_PATH" not in os.environ:  # workers of one session have the same, and the processes that fork others
    os.environ["FP8RL_TESTS_PATH"] = importable = tempfile.mkdtemp(prefix="fp8rl-tests-")
    atexit.register(shutil.rmtree, importable)
    for name in ("lab", "tests"):
        Path(importable, name).symlink_to(ROOT / name)
    Path(importable, "sitecustomize.py").write_text(
        """import gc
gc.set_threshold(100_000, 50, 100)
from tests.support import warm_worker
warm_worker.take_over()
"""
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [importable, os.environ.get("PYTHONPATH")]))
    from fp8rl.numerics.backend.implementation import BOUNDED_MEMORY
    from fp8rl.rollout.engine.server.arguments import server_environment
    from tests.support.elsewhere import compiling
    from tests.support.fork_server import ForkServer, socket_of
    from tests.support.warm_worker import WORKERS

    ForkServer("elsewhere", compiling())
    ForkServer("engine_template", server_environment({}, Path(tempfile.gettempdir()), cuda=False, mode="exact"))
    if not torch.cuda.is_available():  # a GPU's driver bears no forks
        ForkServer("worker_template", os.environ | BOUNDED_MEMORY)
        os.environ[WORKERS] = socket_of("worker_template")
for folder in ("numerics", "models", "rollout", "trainer", "weight_sync", "rl", "diagnose"):
    sys.modules[folder] = None  # type: ignore[assignment]  # importing it fails, wherever pytest looks for tests

# No deadline: a busy two-core machine is slow, not wrong. Derandomized: a failure shows again on the next run.
hypothesis.settings.register_profile("fp8rl", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fp8rl")


LONGEST = "tests/e2e/test_agreement.py"
"""The first worker begins with it, on a rig of its own."""
RIG = [f"tests/e2e/test_{name}.py" for name in ("turns", "updates_in_flight", "explain", "native")]
"""The second worker begins with these: they share its rig, in an order in which neighbours share an engine, too."""
STACKS = [f"tests/e2e/test_{name}.py" for name in ("engine_faults", "gates", "doctor", "teacher", "cli_lifecycle")]
"""They come next, since they need the Ray of either rig."""


class NamesFailures:
    """Names a failure at once: a run that is cut short, as by a time limit, never comes to its summary."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", "").partition("\n")[0]
            self._terminal.write_line(f"\n{report.nodeid} ({report.when}): {reason}", red=True)


class BySharing(LoadFileScheduling):  # type: ignore[misc]
    """A file stays with one worker, since its tests share what they have started; so do those that share the rig."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "the rig" if file in RIG else file


@pytest.hookimpl(trylast=True)  # the terminal's own reporter is there then
def pytest_sessionstart(session: pytest.Session) -> None:
    if getattr(session.config.option, "numprocesses", None):
        plugins = session.config.pluginmanager
        plugins.register(NamesFailures(plugins.get_plugin("terminalreporter")))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> BySharing:
    return BySharing(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which every test is left out by its mark are not imported."""
    left_out = re.findall(r"\bnot (\w+)", config.option.markexpr)
    if not left_out or not collection_path.name.startswith("test_"):
        return None
    marks = re.findall(r"^pytestmark = .*$", collection_path.read_text(), re.MULTILINE)
    return True if any(f"mark.{name}" in line for line in marks for name in left_out) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # of several workers, none should begin the longest files at the end
        items.sort(key=_place)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """What has been imported stays: nobody looks through it for garbage again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 10)  # Python's own


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Of a run with several workers, the files that took the longest: what grows is seen."""
    if not getattr(terminalreporter.config.option, "numprocesses", None):
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds[getattr(report, "nodeid", "").partition("::")[0]] += getattr(report, "duration", 0.0)
    terminalreporter.section("slowest files")
    for file, spent in seconds.most_common(20):
        if spent > 5.0:
            terminalreporter.write_line(f"{spent:6.0f} s  {file}")


def _place(item: pytest.Item) -> tuple[int, bool, bool]:
    file = item.nodeid.partition("::")[0]
    first = [LONGEST, *RIG, *STACKS]
    kept = first.index(file) if file in first else len(first)
    return kept, not item.get_closest_marker("e2e"), not item.get_closest_marker("slow")


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """What is interrupted ignores further signals, as a process that is about to end; this one goes on."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for signum, handler in before.items():
        if handler is not None and signal.getsignal(signum) is not handler:
            signal.signal(signum, handler)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that start meanwhile compile their elementwise kernels, as they do for a user."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)


@pytest.fixture
def warm_engines() -> Iterator[None]:
    """Engines of this process are forked from one that has imported SGLang."""
    from tests.support.warm_engine import forked_engines

    with forked_engines():
        yield


@pytest.fixture
def warm_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that `studies.harness.lab` starts are forked from one that has imported the trainer."""
    from lab.studies.harness import lab
    from tests.support.ranks import WARM

    context = SimpleNamespace(get_context=lambda _: WARM, active_children=multiprocessing.active_children)
    monkeypatch.setattr(lab, "multiprocessing", context)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def layout() -> Iterator[Any]:
    """This process as the one rank of a trainer."""
    from fp8rl.trainer.config import TrainerSection
    from fp8rl.trainer.distributed import parallel

    yield parallel.initialize(TrainerSection())
    parallel.shutdown()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The demo model's, which no test changes."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "examples/models/tiny_qwen3_moe")


@pytest.fixture
def data_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that `datasets` writes on its way go with the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets_cache")
