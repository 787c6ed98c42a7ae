"""Data that cannot be used is refused by its line before anything starts."""

import pytest

from rl.experiment import parse_experiment
from rl.experiment.preconditions import check, data
from tests.support.preconditions import merged, refusal, write_lines


@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "existing JSONL file"),
        ("", "at least one problem"),
        ('{"question": "q", "answer": "#### 1"}\n{"question"\n', "line 2"),
        ('{"question": "q", "answer": "#### 1"}\n{"question": "q", "answer": "one"}\n', "line 2"),
    ],
)
def test_bad_data_files_are_refused(values, tmp_path, key, content, expected):
    path = tmp_path / f"{key}.jsonl"
    path.unlink() if content is None else path.write_text(content)
    text = refusal(values)
    assert text.startswith(f"data.{key}") and expected in text


def test_a_line_of_megabytes_is_refused_untokenized(values, tmp_path, monkeypatch):
    write_lines(tmp_path / "train.jsonl", [("1+1=?", "#### 2"), ("1+1=?" * 2_000_000, "#### 2")])
    tokenized = []
    monkeypatch.setattr(data, "prompt_ids", lambda tokenizer, problem: tokenized.append(len(problem.question)) or [1])
    text = refusal(values)
    assert text.startswith("data.train: line 2") and "10000000 bytes" in text
    assert max(tokenized) < 100


def test_a_reference_that_math_verify_cannot_read_is_named_by_its_line(values, tmp_path):
    write_lines(tmp_path / "train.jsonl", [("q", "#### 3"), ("q", r"#### \frac{1}{2}"), ("q", "so #### $$ ")])
    text = refusal(values, rewards={"functions": [{"function": "math"}]})
    assert text.startswith("data.train: line 3: answer") and "math-verify" in text


def test_answers_need_not_be_integers_for_the_math_reward_or_for_sft(values, tmp_path):
    write_lines(tmp_path / "train.jsonl", [("half of one?", r"$\frac{1}{2}$")])
    check(parse_experiment(merged(values, rewards={"functions": [{"function": "math"}]})))
    check(parse_experiment(merged(values, algorithm={"name": "sft"})))


def test_evaluation_needs_enough_held_out_problems(values):
    assert "at most the 2 problems" in refusal(values, eval={"problems": 3})
    assert refusal(values, data={"eval": None}).startswith("data.eval")
    check(parse_experiment(merged(values, data={"eval": None}, eval={"problems": 0})))


def test_a_prompt_that_leaves_no_room_is_named_by_its_line(values, tmp_path):
    # <|user|> + 30 characters + <|assistant|> = 32 tokens, and 20 new ones.
    write_lines(tmp_path / "train.jsonl", [("1+1=?", "#### 2"), ("1" * 30, "#### 2")])
    check(parse_experiment(merged(values, rollout={"context_length": 52})))
    text = refusal(values, rollout={"context_length": 51})
    assert text.startswith("data.train: line 2") and "32 tokens" in text and "at most 31" in text


def test_a_supervised_pair_must_fit_with_its_end_of_sequence(values, tmp_path):
    write_lines(tmp_path / "train.jsonl", [("1" * 30, "2" * 40)])
    sft = {"algorithm": {"name": "sft"}, "eval": {"problems": 0}}
    check(parse_experiment(merged(values, **sft, rollout={"context_length": 73})))
    assert "72 tokens" in refusal(values, **sft, rollout={"context_length": 72})
