"""Safetensors files of others: one that is damaged, or no file at all, is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fp8rl.numerics.errors import user_error
from fp8rl.numerics.io.reading import check_path, open_regular, reason


def open_tensors(file: Path, key: str) -> Any:
    """Open a safetensors file, as `safe_open` does; messages speak of it as `key`.

    Raises:
        UserError: it is missing, no regular file, or not whole.
    """
    check_path(file, key)
    try:
        open_regular(file).close()  # at a pipe, that library would wait
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        expected = "a whole safetensors file"
        raise user_error(
            f"{key}: {file}", found=reason(error), expected=expected, remedy="Copy the file again."
        ) from None
