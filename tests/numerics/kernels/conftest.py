from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8rl.numerics.backend.implementation import using
from tests.support.elsewhere import compiled_elsewhere


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the compiler makes, for an H200, of the kernels that the file's `SCRIPT` launches."""
    return compiled_elsewhere(request.module.SCRIPT)


@pytest.fixture(params=["triton"] if torch.cuda.is_available() else ["torch", "triton"])
def each_implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run ops as kernels and, on a CPU, as definitions too: by both a row has the same bits everywhere."""
    with using(request.param):
        yield
