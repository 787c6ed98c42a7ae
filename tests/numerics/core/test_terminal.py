"""What a terminal is shown of texts that others wrote."""

import sys
from pathlib import Path

import pytest

from fp8rl.numerics.core.terminal import printable, say, typed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc é 漢 [/b] :smile:", "a\tb\nc é 漢 [/b] :smile:"),
        ("\x1b[2J\x1b]0;title\x07", "�[2J�]0;title�"),
        ("right\rwrong\x08\x7f", "right�wrong��"),
        ("\x9b31m", "�31m"),
        ("abc\u202etxt.exe\u2066", "abc�txt.exe�"),
        ("\udc80", "?"),
    ],
)
def test_a_character_that_a_terminal_would_obey_is_replaced(
    text: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printable(text) == shown
    say(text)
    assert capsys.readouterr().out == shown + "\n"


def test_a_command_is_named_by_its_path_where_the_environment_is_not_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(sys.executable).with_name("fp8rl")
    monkeypatch.setenv("PATH", str(own.parent))
    assert typed("fp8rl") == "fp8rl"
    other = tmp_path / "fp8rl"
    other.write_text("")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))  # of another environment
    monkeypatch.chdir(own.parents[2])
    assert typed("fp8rl") == str(own.relative_to(own.parents[2]))
