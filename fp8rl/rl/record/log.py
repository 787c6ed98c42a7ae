"""log.txt: what the console said, the driver's warnings, and the traceback of what ended a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONSOLE = logging.getLogger("fp8rl.console")
"""Where the console repeats its lines."""


class _QuietFile(logging.FileHandler):
    """A log that is silent about a full disk: the error that ends the run says so; the log must not repeat it line by
    line."""

    def handleError(self, record: logging.LogRecord) -> None: ...


@contextmanager
def run_log(path: Path) -> Iterator[None]:
    """Append to `path` inside the block: console lines, and from all libraries warnings and what is worse."""
    handler = _QuietFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    CONSOLE.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    except KeyboardInterrupt:
        CONSOLE.info("interrupted")
        raise
    except Exception:
        CONSOLE.exception("the run failed")
        raise
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.close()
