from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

ALLOCATE = """
import torch
from fp8rl.weight_sync.transports.tensor import TensorTransport
try:
    TensorTransport(64 << 20).allocate((1,), torch.uint8, torch.device("cpu"))
except OSError as error:
    print(error)
"""


@pytest.mark.slow
def test_shared_memory_that_is_full_is_one_sentence_with_the_remedy() -> None:
    """In a mount namespace of its own, which takes root."""
    inside = ["unshare", "-m", "bash", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$0" "$@"']
    done = subprocess.run([*inside, sys.executable, "-c", ALLOCATE], cwd=ROOT, capture_output=True, text=True)
    if "Operation not permitted" in done.stderr:
        pytest.skip("no mount namespace for this user")
    (said,) = done.stdout.splitlines()
    assert said.startswith("/dev/shm: found no room for a bucket of 16 MiB, expected it; remove what is left"), done
