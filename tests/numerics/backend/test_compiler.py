import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.quantize import fake_quantize_rows
from fp8rl.numerics.quantize import fake_quantize
from fp8rl.numerics.spec import TensorSpec
x = torch.randn(9, 256).bfloat16()
print(enable_compiler())
assert torch.equal(fake_quantize_rows(x, TensorSpec()), fake_quantize(x, TensorSpec()))
"""


@pytest.mark.slow
def test_without_a_working_compiler_everything_runs_as_written(compiled, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    environment = {**os.environ, "CXX": str(broken), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
    assert "quantizers run uncompiled" in done.stderr
