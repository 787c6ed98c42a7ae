"""JSON of others: what would break a program further on is refused where it is read."""

from __future__ import annotations

import json
import math

import pytest

from fp8rl.numerics.core.reading import DEEPEST, parse_json


@pytest.mark.parametrize("text", ['{"a": [1, -2.5e3, true, null, "\\u00e9"]}', '"\\ud83d\\ude00"', "[]", "9" * 300])
def test_json_is_read_as_python_reads_it(text: str) -> None:
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expecting value"),
        (b'"\xff"', "utf-8"),
        (b'"\xed\xa0\x80"', "utf-8"),
        ("[1]".encode("utf-16"), "utf-8"),
        (b'"\\ud800"', "surrogates not allowed"),
        (b'{"\\udfff": 1}', "surrogates not allowed"),
        (b"NaN", "the number NaN"),
        (b"[-Infinity]", "the number -Infinity"),
        (b"1e999", "the number 1e999"),
        (b"9" * 400, "a number of 400 digits"),
        (b"9" * 100_000, "a number of 100000 digits"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), "more than 100 deep"),
        (b'{"a":' * 100_000, "more than 100 deep"),
    ],
)
def test_what_no_program_could_work_with_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(data)


def test_nesting_counts_lists_and_objects_alike() -> None:
    assert parse_json('[{"a":' * (DEEPEST // 2) + "1" + "}]" * (DEEPEST // 2))


def test_numbers_that_python_itself_writes_are_read_where_they_may_stand() -> None:
    assert math.isnan(parse_json("NaN", finite=False)) and parse_json("-Infinity", finite=False) == -math.inf
