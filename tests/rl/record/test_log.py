import logging
import warnings
from pathlib import Path

import pytest

from fp8rl.rl.record.console import StepConsole, run_log


def test_it_has_the_console_s_lines_warnings_and_the_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.txt"
    with pytest.raises(RuntimeError), run_log(path), StepConsole(2) as console:
        console.note("engine [up]")
        logging.getLogger("some.library").info("chatter")
        logging.getLogger("some.library").warning("low on disk")
        warnings.warn("old name", stacklevel=1)
        raise RuntimeError("out of luck")
    text = path.read_text()
    for part in ("fp8rl.console: engine [up]", "WARNING some.library: low on disk", "old name", "the run failed"):
        assert part in text
    assert text.rstrip().endswith("RuntimeError: out of luck")
    assert "chatter" not in text
    assert capsys.readouterr().out == "engine [up]\n"


def test_it_is_appended_to_and_let_go(tmp_path: Path) -> None:
    path, handlers = tmp_path / "log.txt", list(logging.getLogger().handlers)
    for line in ("first run", "resumed run"):
        with run_log(path), StepConsole(1) as console:
            console.note(line)
    with pytest.raises(KeyboardInterrupt), run_log(path):
        raise KeyboardInterrupt
    logging.getLogger("late").warning("after the end")
    lines = path.read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["first run", "resumed run", "interrupted"]
    assert logging.getLogger().handlers == handlers
