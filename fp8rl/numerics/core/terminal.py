"""Texts on a terminal: what a user, a model or a server wrote is shown, and never obeyed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import TextIO

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tabs and line ends, and characters that change the direction of the text after them."""


def printable(text: str, instead: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """Return the text with `instead` for each character that a terminal would obey; lines and tabs stay.

    Half of a surrogate pair, which a path may have and no terminal takes, becomes a question mark.
    """
    return _OBEYED.sub(instead, text).encode("utf-8", "replace").decode()


def say(text: object, to: TextIO | None = None) -> None:
    """Print a line at once, to the standard output by default."""
    print(printable(str(text)), file=to or sys.stdout, flush=True)


def say_error(text: object) -> None:
    """Print a line at once to the standard error."""
    say(text, sys.stderr)


def typed(command: str) -> str:
    """Return a command of this environment as this shell finds it: `make demo` runs in one that is not activated."""
    own, found = Path(sys.executable).with_name(command), shutil.which(command)
    return command if found is not None and os.path.realpath(found) == os.path.realpath(own) else os.path.relpath(own)
