"""Loading problems."""

import codecs
import dataclasses
import datetime
import gzip
import json
import math
import mmap
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rollout.tasks.data import Source, load_problems, rows
from fp8rl.rollout.types import Problem

GOOD = b'{"question": "2+3=?", "answer": "#### 5"}\n'


def write_lines(rows, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_table(rows, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_problems_are_read_in_order_with_their_further_keys(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + GOOD + '{"question": "é\u2028?", "answer": "x #### -1", "level": 3}'.encode())
    assert list(load_problems(Source(path))) == [
        Problem("2+3=?", "#### 5"),
        Problem("é\u2028?", "x #### -1", fields={"level": 3}),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json}\n", "valid JSON"),
        (b"[1, 2]\n", "JSON object"),
        (b'{"question": "q", "answer": 2.5}\n', "found 2.5, expected non-empty text, or a whole number"),
        (b'{"question": "q"}\n', "'answer'"),
        (b'{"question": " ", "answer": "5"}\n', "question"),
        (b'{"question": "\\ud800", "answer": "5"}\n', "question"),
        (b"[" * 100_000 + b"\n", "valid JSON"),
        (b'{"question": "\xff", "answer": "5"}\n', "UTF-8"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line, reason):
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + line + GOOD)
    with pytest.raises(UserError, match=reason) as error:
        list(load_problems(Source(path, "data.train")))
    assert "data.train" in str(error.value) and "line 2 of" in str(error.value) and "p.jsonl" in str(error.value)


def test_a_row_of_megabytes_is_refused_before_it_is_parsed(tmp_path, data_cache, monkeypatch):
    monkeypatch.setattr(rows, "LONGEST_ROW", 1 << 20)
    row = {"question": "q", "answer": "1", "more": "x" * (1 << 20)}
    (tmp_path / "p.jsonl").write_bytes(GOOD + b"{" + json.dumps(row).encode() + b"\n")  # which is no JSON
    write_table([{**row, "more": ""}, row], tmp_path / "p.parquet")
    for name, found in (("p.jsonl", "line 2 of"), ("p.parquet", "row 2 of")):
        problems = load_problems(Source(tmp_path / name))
        for read in (lambda problems: problems[1], list):
            with pytest.raises(UserError, match=rf"data: {found} .*found 104\d{{4}} bytes, expected at most 1048576"):
                read(problems)
        assert problems[0].answer


QUESTIONS = [{"question": f"{i}+1=?", "answer": f"#### {i + 1}", "level": i} for i in range(5)]
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}]


@pytest.fixture
def saved(tmp_path, data_cache):
    """The same problems in each form that they may have, by name."""
    from datasets import Dataset, DatasetDict

    others = [{"question": "x", "answer": "y", "level": 0}]
    write_lines(QUESTIONS, tmp_path / "p.jsonl")
    write_table(QUESTIONS, tmp_path / "[odd] name*.parquet")
    Dataset.from_list(QUESTIONS).save_to_disk(tmp_path / "saved")
    splits = {"train": Dataset.from_list(others), "test": Dataset.from_list(QUESTIONS)}
    DatasetDict(splits).save_to_disk(tmp_path / "splits")
    write_table(others, tmp_path / "folder/data/train-00000-of-00001.parquet")
    write_table(QUESTIONS, tmp_path / "folder/data/test-00000-of-00001.parquet")
    return {
        "lines": Source(tmp_path / "p.jsonl"),
        "parquet": Source(tmp_path / "[odd] name*.parquet"),
        "saved": Source(tmp_path / "saved"),
        "saved splits": Source(tmp_path / "splits", split="test"),
        "folder": Source(tmp_path / "folder", split="test"),
    }


def test_every_form_of_data_gives_the_same_problems(saved):
    expected = [Problem(row["question"], row["answer"], fields={"level": row["level"]}) for row in QUESTIONS]
    for name, source in saved.items():
        problems = load_problems(source)
        assert len(problems) == 5 and list(problems) == expected and problems[3] == expected[3], name
        assert problems[1:3] == expected[1:3] and problems.name(3) == ("line 4" if name == "lines" else "row 4")


@pytest.mark.parametrize(("name", "other"), [("k[1]", "k1"), ("run*", "run_old"), ("[c]/d", "c/d")])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "README.md"])
def test_a_directory_whose_name_is_a_pattern_gives_its_own_rows(tmp_path, data_cache, name, other, kind):
    for folder, answer in ((tmp_path / name, "own"), (tmp_path / other, "other's")):
        row = {"question": "q", "answer": answer}
        write_lines([row], folder / "train.jsonl")
        if kind == "README.md":
            configurations = [{"config_name": "default", "data_files": "tr*.jsonl"}]
            (folder / kind).write_text(f"---\n{json.dumps({'configs': configurations})}\n---\n")
        elif kind != "jsonl":
            (folder / "train.jsonl").unlink()
            write = pyarrow.parquet.write_table if kind == "parquet" else pyarrow.csv.write_csv
            write(pyarrow.Table.from_pylist([row]), folder / f"train.{kind}")
    assert [problem.answer for problem in load_problems(Source(tmp_path / name))] == ["own"]


@pytest.mark.parametrize("left", ["extra.jsonl", "train.csv", "more/x.parquet"])
def test_tables_that_a_directory_would_leave_out_are_named(tmp_path, data_cache, left):
    row = {"question": "q", "answer": "1"}
    write_lines([row], tmp_path / "all/train.jsonl/part-0.jsonl")
    assert len(load_problems(Source(tmp_path / "all"))) == 1
    write_lines([row], tmp_path / "all" / left)
    with pytest.raises(UserError, match=rf"all with (train\S+|{left}), which datasets leaves out.* data.split"):
        load_problems(Source(tmp_path / "all"))
    assert len(load_problems(Source(tmp_path / "all", split="train"))) == 1


def test_a_path_that_datasets_takes_for_a_chain_is_refused(tmp_path, data_cache):
    for name in ("a", "a::b/c"):
        write_lines([{"question": "q", "answer": name}], tmp_path / name / "train.jsonl")
    with pytest.raises(UserError, match="expected a path without '::'"):
        load_problems(Source(tmp_path / "a::b/c"))
    assert len(load_problems(Source(tmp_path / "a::b/c/train.jsonl"))) == 1


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


NESTED = [
    {"tools": [call("f", a=1)], "reset": {"seed": 3, "place": {"x": 1}}, "rows": [[{"p": 1}], [{"q": [None, 2]}]]},
    {"tools": [call("g", b={"c": [{"d": 1}, {"e": 2}]}), call("h")], "reset": {}, "rows": []},
    {"tools": [], "reset": {"place": {"y": 2}}, "rows": [[]]},
]
MIXED = [{"tools": [call("f", a=1)]}, {"tools": [call("g", a="one"), call("h", a=[1, {"b": 2}])]}]


@pytest.mark.parametrize("nested", [NESTED, MIXED], ids=["other keys", "other types"])
def test_nested_values_of_tables_have_no_keys_of_other_rows(tmp_path, data_cache, nested):
    rows = [{"question": [TURNS[1] | row, TURNS[1]], "answer": "2", **row} for row in nested]
    write_lines(rows, tmp_path / "lines.jsonl")
    write_lines(rows, tmp_path / "folder/train.jsonl")
    names = ["lines.jsonl", "folder"]
    if nested is NESTED:
        write_table(rows, tmp_path / "p.parquet")
        names.append("p.parquet")
    for name in names:
        problems = load_problems(Source(tmp_path / name))
        for found in (list(problems), [problems[index] for index in range(len(rows))]):
            assert [problem.conversation for problem in found] == [row["question"] for row in rows], name
            seen = [{k: v for k, v in problem.fields.items() if v is not None} for problem in found]
            assert seen == nested, name


def test_a_number_that_json_lacks_is_null_in_every_form_of_data(tmp_path, data_cache):
    rows = [{"question": "1+2=?", "answer": "3", "level": level, "all": [level]} for level in (1.5, math.nan, math.inf)]
    write_lines(rows, tmp_path / "rows.jsonl")
    write_table(rows, tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        found = [problem.fields for problem in load_problems(Source(tmp_path / name))]
        assert found == [{"level": level, "all": [level]} for level in (1.5, None, None)], name


def test_a_turn_that_only_calls_a_tool_needs_no_content(tmp_path, data_cache):
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    asked, answered = {"role": "user", "content": "1+2=?"}, {"role": "tool", "content": "3"}
    turns = [[asked, {"role": "assistant", "tool_calls": calls, **said}, answered] for said in ({}, {"content": None})]
    rows = [{"question": each, "answer": "#### 3"} for each in turns]
    write_lines(rows, tmp_path / "rows.jsonl")
    write_table(rows, tmp_path / "rows.parquet")
    wanted = (asked, {"role": "assistant", "content": "", "tool_calls": calls}, answered)
    for name in ("rows.jsonl", "rows.parquet"):
        assert [problem.messages for problem in load_problems(Source(tmp_path / name))] == [wanted, wanted]
    parts = [{"type": "text", "text": text} for text in ("1+", "2=?")]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": [{**asked, "content": parts}], "answer": "#### 3"}))
    assert load_problems(Source(tmp_path / "rows.jsonl"))[0].messages == (asked,)


def test_a_csv_has_questions_and_answers_as_they_are_written(tmp_path, data_cache):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train.csv").write_text("q,answer,level\n1,007,3\n2,1.50,4\n")
    problems = load_problems(Source(tmp_path / "mine", question="q"))
    found = [(each.question, each.answer, each.fields) for each in problems]
    assert found == [("1", "007", {"level": 3}), ("2", "1.50", {"level": 4})]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"question": "2020-01-02", "answer": "x"}, "question"),
        ({"question": "q", "answer": "x", "at": {"days": [{"day": "2020-01-02"}]}}, "at.days.day"),
    ],
)
def test_dates_that_a_directory_of_json_would_change_are_refused(tmp_path, data_cache, row, column):
    write_lines([row], tmp_path / "mine/train.jsonl")
    with pytest.raises(UserError, match=f"with dates in {column}, which .* Name the file itself"):
        load_problems(Source(tmp_path / "mine"))
    (problem,) = load_problems(Source(tmp_path / "mine/train.jsonl"))
    assert problem.question == row["question"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.csv", b"question,answer\n1+1=?,2\n"),
        ("x.json", b'[\n{"question": "1+1=?", "answer": "2"}\n]\n'),
        ("x.jsonl.gz", gzip.compress(b'{"question": "1+1=?", "answer": "2"}\n', mtime=0)),
    ],
)
def test_files_that_only_a_directory_takes_are_named_with_it(tmp_path, data_cache, name, content):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_bytes(content)
    with pytest.raises(UserError, match=f"Put {name} into a separate directory, and set the path"):
        load_problems(Source(tmp_path / "mine" / name))[0]
    assert [problem.answer for problem in load_problems(Source(tmp_path / "mine"))] == ["2"]


def test_a_file_too_large_for_memory_is_read_line_by_line(saved, monkeypatch):
    monkeypatch.setattr(rows, "READ_WHOLE", 10)
    problems = load_problems(saved["lines"])
    assert isinstance(problems._rows._data, mmap.mmap)
    assert [problem.question for problem in problems] == [row["question"] for row in QUESTIONS]


def test_columns_have_names_of_the_users_and_may_be_nested(tmp_path, data_cache):
    rows = [
        {"prompt": TURNS, "reward_model": {"ground_truth": "2", "style": "rule"}, "when": datetime.date(2026, 1, 2)},
        {"prompt": [*TURNS, {"role": "assistant", "content": "2"}, TURNS[1]], "reward_model": None, "when": None},
    ]
    write_table(rows, tmp_path / "p.parquet")
    source = Source(tmp_path / "p.parquet", "k", None, "prompt", "reward_model.ground_truth", "Be long.")
    problems = load_problems(source)
    assert problems[0].messages == tuple(TURNS), "a conversation keeps its own system prompt"
    assert (problems[0].question, problems[0].answer) == ("1+1=?", "2")
    assert problems[0].fields == {"reward_model": {"ground_truth": "2", "style": "rule"}, "when": "2026-01-02"}
    has = r"^k: row 2 of .*found \['prompt', 'reward_model', 'when'\], expected a column 'reward_model.gr"
    with pytest.raises(UserError, match=has) as error:
        problems[1]
    assert error.value.remedy.startswith("Correct row 2, or set data.keys")


def test_a_whole_number_is_an_answer_and_a_system_prompt_begins_what_has_none(tmp_path):
    own = [{"role": "developer", "content": "D"}, TURNS[1]]
    lines = [{"question": "q", "answer": 72}, *({"question": turns, "answer": "3"} for turns in (TURNS[1:], own))]
    write_lines(lines, tmp_path / "p")
    first, second, third = load_problems(Source(tmp_path / "p", system_prompt="S", chat_template={"short": True}))
    system = {"role": "system", "content": "S"}
    assert first.answer == "72" and first.conversation == [system, {"role": "user", "content": "q"}]
    assert second.conversation == [system, TURNS[1]] and second.question == "1+1=?"
    assert third.conversation == own
    assert first.chat_template == {"short": True}


@pytest.mark.parametrize(
    ("question", "found"),
    [
        (3, "non-empty text, or a list of chat messages"),
        (["1+1=?"], "role and content"),
        ([{"role": "assistant", "content": None}, TURNS[1]], "role and content, which are text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "expected chat messages .* text .no pictures."),
        ([], "not the assistant.s"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "not the assistant.s"),
    ],
)
def test_a_question_of_another_type_is_refused(tmp_path, question, found):
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": question, "answer": "1"}) + "\n")
    with pytest.raises(UserError, match=f"data: line 1 of .*: question: .*{found}"):
        list(load_problems(Source(tmp_path / "p.jsonl")))


def test_what_is_not_there_is_said_with_what_is(saved, tmp_path):
    def refused(text: str, form: Source | str, **changes: Any) -> None:
        source = form if isinstance(form, Source) else dataclasses.replace(saved[form], **changes)
        with pytest.raises(UserError, match=text):
            list(load_problems(source))

    for form in ("parquet", "saved", "folder"):
        has = "expected a column of .*which has question, answer, level. Set data.keys.question"
        refused(f"^data.train: keys.question: found 'prompt', {has}", form, key="data.train", question="prompt")
    refused("line 1 .*expected a column 'solution.value'.*data.keys.answer", "lines", answer="solution.value")
    for form in ("folder", "saved splits"):
        for split in ("validation", None):
            refused(f"^data.split: found {split!r}, expected one of train, test", form, split=split)
    for form in ("parquet", "saved", "lines"):
        refused("data.split: found 'test', expected none", form, split="test")
    for form, text in (("folder", "one of default"), ("saved splits", "none"), ("lines", "none")):
        refused(f"^data.name: found 'x', expected {text}", form, name="x")
    (tmp_path / "empty").mkdir()
    refused("empty: .*parquet, JSON or CSV files", Source(tmp_path / "empty"))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    refused("at least one problem", Source(tmp_path / "empty.jsonl"))
    refused("no such file', expected an existing JSONL file, parquet", Source(tmp_path / "absent.parquet"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nonsense")
    whole = (tmp_path / "[odd] name*.parquet").read_bytes()
    (tmp_path / "torn.parquet").write_bytes(whole[:40] + b"\0" * 40 + whole[80:])
    for name in ("bad", "torn"):
        refused("expected a whole parquet file of one row or more", Source(tmp_path / f"{name}.parquet"))


def test_a_directory_with_several_configurations_is_refused_with_their_names(tmp_path, data_cache):
    names = ("main", "socratic")
    configurations = [{"config_name": name, "data_files": f"{name}/train.jsonl"} for name in names]
    for name in names:
        write_lines([{"question": "2+3=?", "answer": "#### 5"}], tmp_path / name / "train.jsonl")
    (tmp_path / "README.md").write_text(f"---\n{json.dumps({'configs': configurations})}\n---\n")
    has = r"data.name: found None, expected one of main, socratic, the conf.*name: main}\.$"
    with pytest.raises(UserError, match=has):
        load_problems(Source(tmp_path))
    assert len(load_problems(Source(tmp_path / "main"))) == 1
    configurations[1]["default"] = True
    (tmp_path / "README.md").write_text(f"---\n{json.dumps({'configs': configurations})}\n---\n")
    assert len(load_problems(Source(tmp_path))) == 1


def test_pipes_and_devices_are_no_data(tmp_path, data_cache):
    os.mkfifo(tmp_path / "p.jsonl")
    os.mkfifo(tmp_path / "p.parquet")
    for path in (tmp_path / "p.jsonl", tmp_path / "p.parquet", tmp_path, Path("/dev/zero"), tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="data.train: found"):
            load_problems(Source(path, "data.train"))
