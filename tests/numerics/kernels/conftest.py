from typing import Any

import pytest

from tests.support.elsewhere import compiled_elsewhere


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the compiler makes, for an H200, of the kernels that the file's `SCRIPT` launches."""
    return compiled_elsewhere(request.module.SCRIPT)
