import shutil
import subprocess
import sys

import pytest

from fp8rl.numerics.core.files import code_digest
from tests.support.paths import ROOT

PACKAGES = ("fp8rl.numerics", "fp8rl.models", "fp8rl.rollout")


def test_another_checkout_has_another_digest_as_soon_as_a_line_differs(tmp_path):
    shutil.copytree(ROOT / "fp8rl", tmp_path / "fp8rl", ignore=shutil.ignore_patterns("__pycache__"))
    assert digest_in(tmp_path) == code_digest(PACKAGES)
    with (tmp_path / "fp8rl/numerics/ops/rope.py").open("a") as file:
        file.write("# changed\n")
    assert digest_in(tmp_path) != code_digest(PACKAGES)


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(ModuleNotFoundError, match="no package nowhere"):
        code_digest(["nowhere"])


def digest_in(folder):
    program = f"from fp8rl.numerics.core.files import code_digest; print(code_digest({PACKAGES}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
