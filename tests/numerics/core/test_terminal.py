"""What a terminal is shown of texts that others wrote."""

import pytest

from fp8rl.numerics.core.terminal import printable, say


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
