"""Loading problems."""

import pytest

from numerics.errors import UserError
from rollout.data import load_problems
from rollout.tasks import Problem

GOOD = b'{"question": "2+3=?", "answer": "#### 5"}\n'


def test_problems_are_read_in_order_with_their_further_keys(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + '{"question": "é\u2028?", "answer": "x #### -1", "level": 3}'.encode())
    assert load_problems(path) == [Problem("2+3=?", "#### 5"), Problem("é\u2028?", "x #### -1", fields={"level": 3})]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json}\n", "valid JSON"),
        (b"\n", "valid JSON"),
        (b"[1, 2]\n", "JSON object"),
        (b'{"question": "q"}\n', "'answer'"),
        (b'{"question": "q", "answer": 5}\n', "answer"),
        (b'{"question": " ", "answer": "5"}\n', "question"),
        (b'{"question": "\\ud800", "answer": "5"}\n', "question"),
        (b"[" * 100_000 + b"\n", "valid JSON"),
        (b'{"question": ' + b"1" * 5000 + b"}\n", "valid JSON"),
        (b'{"question": "\xff", "answer": "5"}\n', "UTF-8"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line, reason):
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + line + GOOD)
    with pytest.raises(UserError, match=reason) as error:
        load_problems(path, "data.train")
    assert "data.train" in str(error.value) and "line 2 of" in str(error.value) and "p.jsonl" in str(error.value)


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="existing JSONL file"):
        load_problems(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="at least one problem"):
        load_problems(tmp_path / "empty.jsonl")
