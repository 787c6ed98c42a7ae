"""Cards of data sets, which anybody uploads: what they say of files is read, or refused in one short sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8rl.models.cards import read_configurations
from fp8rl.numerics.core.errors import UserError
from fp8rl.rollout.tasks.data.rows import open_rows
from tests.support.odd_input import TEXTS

BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))])
FILES = "configs:\n- config_name: a\n  data_files: "
ODD = {
    **{text[:12]: f"configs: {text}" for text in TEXTS},
    **{f"name {text[:12]}": f"configs:\n- config_name: {text}" for text in TEXTS},
    **{f"files {text[:12]}": FILES + text for text in TEXTS},
    "bomb": f"{BOMB}\nconfigs: *a29",
    "bomb of files": f"{BOMB}\nconfigs:\n- {{config_name: a, data_files: *a29}}",
    "itself": "configs: &a\n- *a",
    "no mapping": "- a\n- b",
    "a text": "x",
    "no name": "configs:\n- data_files: x",
    "above": FILES + "../../x",
    "root": FILES + "/etc/passwd",
    "elsewhere": FILES + "[https://example.com/x.jsonl]",
    "no path": FILES + "[{split: train}]",
    "long": "configs:\n" + "\n".join(f"- config_name: {'n' * 5000}{n}" for n in range(9)),
    "many": "configs:\n" + "\n".join(f"- config_name: {'n' * 50}{n}" for n in range(3000)),
    "key of a list": "? [a]\n: b",
    "features": "dataset_info:\n  features: 7\nconfigs:\n- {config_name: a, features: 7}",
    "dataset_info": "dataset_info: 7",
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_card_is_read_or_refused_in_a_short_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{ODD[name]}\n---\n")
    (tmp_path / "a.jsonl").write_text('{"question": "1+1=?", "answer": "2"}\n')
    for config in (None, "a"):
        try:
            assert len(open_rows(tmp_path, None, "data.train", config)) == 1
        except UserError as error:
            assert len(str(error)) < 1500 and "\n" not in str(error)


@pytest.mark.parametrize(
    ("said", "patterns"),
    [
        ("", []),
        (", data_dir: b", ["b/*"]),
        (", data_dir: b, version: 010, made: 12:30", ["b/*"]),
        (", data_files: x/*.jsonl", ["x/*.jsonl"]),
        (", data_files: [x, y], data_dir: b", ["b/x", "b/y"]),
        (", data_files: [{split: train, path: x}, {split: test, path: [y, z]}]", ["x", "y", "z"]),
        (", data_files: {train: x, test: [y]}", ["x", "y"]),
    ],
)
def test_files_of_a_configuration(said: str, patterns: list[str], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\nconfigs: [{{config_name: 2024{said}}}]\n---\n# It\n")
    assert read_configurations(tmp_path, "data.train")["2024"].patterns == patterns
