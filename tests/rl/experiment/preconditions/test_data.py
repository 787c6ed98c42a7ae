"""Data that cannot be used is refused by its line before anything starts."""

import json
from types import SimpleNamespace

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import parse_experiment
from fp8rl.rl.experiment.preconditions import check, data
from fp8rl.rl.experiment.preconditions.tokenizer import load_tokenizer
from fp8rl.rollout.tasks.data import Source, load_problems
from tests.support.preconditions import merged, refusal, write_lines


@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "existing JSONL file"),
        ('{"question": "q", "answer": "#### 1"}\n{"question": "q", "answer": "one"}\n', "line 2"),
    ],
)
def test_bad_data_files_are_refused(values, tmp_path, key, content, expected):
    path = tmp_path / f"{key}.jsonl"
    path.unlink() if content is None else path.write_text(content)
    text = refusal(values)
    assert text.startswith(f"data.{key}") and expected in text


def test_a_line_of_megabytes_is_refused_untokenized(values, tmp_path, monkeypatch):
    write_lines(tmp_path / "train.jsonl", [("1+1=?", "#### 2"), ("1+1=?" * 1_600_000, "#### 2")])
    tokenized = []
    monkeypatch.setattr(data, "prompt_ids", lambda tokenizer, problem: tokenized.append(len(problem.question)) or [1])
    text = refusal(values)
    assert text.startswith("data.train: line 2") and "8000000 bytes" in text
    assert max(tokenized) < 100


def test_evaluation_needs_enough_held_out_problems(values):
    assert "at most the 2 problems" in refusal(values, eval={"problems": 3})
    assert refusal(values, data={"eval": None}).startswith("data.eval")
    check(parse_experiment(merged(values, data={"eval": None}, eval={"problems": 0})))
    check(parse_experiment({name: section for name, section in values.items() if name != "eval"}))


def test_a_run_in_rays_copy_of_a_folder_is_told_that_ray_removes_it(values, tmp_path):
    copy = tmp_path / "runtime_resources/working_dir_files/_ray_pkg_0123456789abcdef"
    said = []
    for folder in (copy / "runs", tmp_path / "runs"):
        check(parse_experiment(merged(values, run={"dir": str(folder)})), said.append)
    assert [text.partition(" is in ")[0] for text in said if "Ray" in text] == [f"run.dir: {copy}/runs"]
    assert "Set run.dir" in next(text for text in said if "Ray" in text)


def test_a_prompt_that_leaves_no_room_is_named_by_its_line(values, tmp_path):
    # <|user|> + 30 characters + <|assistant|> = 32 tokens, and 20 new ones.
    write_lines(tmp_path / "train.jsonl", [("1+1=?", "#### 2"), ("1" * 30, "#### 2")])
    check(parse_experiment(merged(values, rollout={"context_length": 52})))
    text = refusal(values, rollout={"context_length": 51})
    assert text.startswith("data.train: line 2") and "32 tokens" in text and "at most 31" in text


def test_what_a_template_writes_beside_the_content_counts_as_length(values, model, tmp_path):
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
        "{% endfor %}{{ m.reasoning_content or '' }}{% endfor %}<|assistant|>"
    )
    (model / "chat_template.jinja").write_text(template)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "1" * 900}}}
    roles = ("user", "assistant", "tool")
    for beside in ({"tool_calls": [call]}, {"reasoning_content": "1" * 900}):
        turns = [{"role": role, "content": "q", **(beside if role == "assistant" else {})} for role in roles]
        (tmp_path / "train.jsonl").write_text(json.dumps({"question": turns, "answer": "#### 1"}))
        check(parse_experiment(merged(values, rollout={"context_length": 1024})))
        assert refusal(values, rollout={"context_length": 800}).startswith("data.train: line 1: found 'a prompt of ")


def test_the_place_of_a_picture_is_named_by_its_line(values, tmp_path):
    write_lines(tmp_path / "train.jsonl", [("q", "#### 3"), ("q<|extra_7|>", "#### 3")])
    experiment = parse_experiment(values)
    tokenizer = load_tokenizer(experiment.model.path, "model.path")
    data.check_data(experiment, tokenizer)
    with pytest.raises(UserError, match=r"data.train: line 2: found '<\|extra_7\|>, the place of a picture', exp"):
        data.check_data(experiment, tokenizer, pictures=("<|extra_3|>", "<|extra_7|>"))


def test_a_supervised_pair_must_fit_with_its_end_of_sequence(values, tmp_path):
    write_lines(tmp_path / "train.jsonl", [("1" * 30, "2" * 40)])
    sft = {"algorithm": {"name": "sft"}, "eval": {"problems": 0}}
    check(parse_experiment(merged(values, **sft, rollout={"context_length": 73})))
    assert "72 tokens" in refusal(values, **sft, rollout={"context_length": 72})


def said(values: dict, **sections: dict) -> list[str]:
    remarks: list[str] = []
    check(parse_experiment(merged(values, **sections)), remarks.append)
    return remarks


def test_problems_that_are_held_out_and_trained_on_are_said(values, tmp_path):
    assert said(values) == []
    write_lines(tmp_path / "train.jsonl", [("9+4=?", "#### 13"), ("1+4=?", "#### 5"), ("1+4=?", "#### 5")])
    (remark,) = said(values)
    assert remark == (
        "All 2 evaluated problems of data.eval are also trained on (line 1 = line 2 of data.train, line 2 = line 2 of "
        "data.train): held-out accuracy is not held out"
    )
    own = {"sets": [{"name": "own", "path": str(tmp_path / "train.jsonl"), "problems": 1}]}
    assert any(text.startswith("All 1 evaluated problems of eval.sets.0") for text in said(values, eval=own))
    assert said(values, eval={"problems": 0}) == []


def test_of_many_problems_a_sample_is_looked_at_and_that_is_said(values, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "ALL_READ", 100)
    monkeypatch.setattr(data, "SAMPLED", 50)
    problems = [("9+4=?", "#### 13")] * 1000
    write_lines(tmp_path / "train.jsonl", problems)
    assert said(values) == ["data.train: looked at the first 100 of 1000 lines and at 50 of the others"]
    write_lines(tmp_path / "train.jsonl", [*problems[:99], ("q", "no number")])
    assert refusal(values).startswith("data.train: line 100: answer")
    write_lines(tmp_path / "train.jsonl", [*problems[:100], *[("q", "no number")] * 100])
    number = int(refusal(values).split()[2].rstrip(":"))
    assert 100 < number <= 200


def test_each_source_and_each_set_is_looked_at(values, tmp_path):
    write_lines(tmp_path / "more.jsonl", [("q", "#### 1"), ("q", "none")])
    more = str(tmp_path / "more.jsonl")
    text = refusal(values, data={"train": [values["data"]["train"], {"path": more, "weight": 2.0}]})
    assert text.startswith("data.train.1: line 2: answer")
    own = {"name": "m", "path": more, "rewards": [{"function": "math"}]}
    check(parse_experiment(merged(values, eval={"sets": [own]})))
    text = refusal(values, eval={"sets": [{**own, "problems": 3}]})
    assert text.startswith("eval.sets.0.problems: found 3, expected at most the 2 problems")
    text = refusal(values, eval={"sets": [{**own, "max_new_tokens": 1022}]})
    assert text.startswith("eval.sets.0: line 1: found 'a prompt of 1 bytes") and "max_new_tokens = 1022" in text
    check(parse_experiment(merged(values, data={"eval": None}, eval={"problems": 1, "sets": [own]})))


@pytest.mark.parametrize("answer", ["####", "#### $", r"so \boxed{5}. Final: \boxed{", r"\boxed{}", "..."])
def test_a_reference_without_a_result_is_refused_before_math_would_fail(values, tmp_path, answer):
    write_lines(tmp_path / "train.jsonl", [("q", r"\boxed{1}"), ("q", answer)])
    rewards = {"functions": [{"function": "math"}]}
    said = refusal({**values, "rewards": rewards}, eval={"problems": 0})
    assert said.startswith("data.train: line 2: answer: found ")


TEMPLATE = (
    "{% if style == 'loud' %}!{% elif style %}{{ raise_exception('no such style') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if m.role != 'system' or systems %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"chat_template": {"style": "loud"}}, None),
        ({"chat_template": {"style": "loud", "systems": True}, "system_prompt": "S"}, None),
        ({"chat_template": {"style": "soft"}}, "data.train: chat_template: found {'style': 'soft'}"),
        ({"chat_template": {"stile": "loud"}}, "found 'stile', expected what the chat template of model.path reads: "),
        ({"chat_template": {"tokenize": False}}, "found 'tokenize', expected what"),
        ({"system_prompt": "S"}, "data.train: system_prompt: found 'S', expected none"),
    ],
)
@pytest.mark.parametrize("mark", ["{}", "{{% generation %}}{}{{% endgeneration %}}"])
def test_arguments_that_the_chat_template_does_not_take_are_refused(values, model, section, expected, mark):
    said = "{{ m.content }}"
    (model / "chat_template.jinja").write_text(TEMPLATE.replace(said, mark.format(said)))
    if expected is None:
        check(parse_experiment(merged(values, eval={"problems": 0}, data=section)))
    else:
        assert expected in refusal(values, eval={"problems": 0}, data=section)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"role": "human"}, "messages.1: found {'role': 'human', 'thinking': '', 'content': '3'}"),
        ({"role": "assistant", "thinking": "so"}, "thinking: found 'so', expected no thoughts, which the chat"),
        ({"content": "", "role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "tool_calls: found [{'"),
    ],
)
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_roles_and_thoughts_that_the_chat_template_leaves_out_are_named(values, model, tmp_path, turn, said, algorithm):
    template = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (model / "chat_template.jinja").write_text(template)
    asked = {"role": "user", "content": "q"}
    turns = [[asked, {"role": "assistant", "thinking": "", "content": "3", **last}, asked] for last in ({}, turn)]
    lines = [json.dumps({"question": question, "answer": "#### 1"}) for question in turns]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    assert refusal(values, algorithm={"name": algorithm}).startswith(f"data.train: line 2: {said}")


def test_an_answer_without_the_thoughts_that_its_prompt_opens_is_refused(values, model, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if add_generation_prompt }}"
    (model / "chat_template.jinja").write_text(template)
    write_lines(tmp_path / "train.jsonl", [("q", "so</think>1"), ("q", "1")])
    assert "line 2: answer: found no thoughts" in refusal(values, algorithm={"name": "sft"}, eval={"problems": 0})


def test_calls_that_the_chat_template_cannot_write_are_named_behind_others_of_equal_roles(values, model, tmp_path):
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(template)

    def turns(calls):
        asked, answered = {"role": "user", "content": "q"}, {"role": "tool", "content": "3"}
        return [asked, {"role": "assistant", "content": "", **calls}, answered]

    calls = [*({"function": {"name": name}} for name in "fg"), {"id": "1"}]
    lines = [json.dumps({"question": turns({"tool_calls": [call]}), "answer": "#### 1"}) for call in calls]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    assert refusal(values).startswith('data.train: line 3: found "turns of user, assistant, tool, at which the')


def test_a_tokenizer_that_loses_text_is_said(tmp_path):
    """A file of whole characters, which transformers loads as byte-level pieces because of the model's type."""
    write_lines(tmp_path / "train.jsonl", [("1+1=?", "1+1=2\n#### 2")])
    loaded = data._lost_text(LosesBlanks(), load_problems(Source(tmp_path / "train.jsonl")))
    assert loaded.startswith("data: the tokenizer of model.path does not keep text: the answer of line 1, ")
    assert "'1+1=2\\n#### 2', comes back as '1+1=2####2'" in loaded


def test_a_template_that_writes_no_answer_is_refused_for_supervised_rows(values, model):
    path = model / "tokenizer_config.json"
    template = (
        "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    )
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    check(parse_experiment(values))
    text = refusal(values, algorithm={"name": "sft"})
    assert text.startswith("data.train: line 1: found 'turns of user, assistant, at which the chat template fails: no'")


class LosesBlanks:
    eos_token_id = "</s>"

    def __call__(self, text, **_):
        return SimpleNamespace(input_ids=text.split())

    def decode(self, ids, **_):
        return "".join(ids)


def entry(**kwargs):
    return [{"function": "integer"}, {"function": "model", "kwargs": {"url": "http://127.0.0.1:1", **kwargs}}]


def test_a_reward_models_tokenizer_is_read_at_the_start(values, model, tmp_path):
    assert "kwargs give no tokenizer" in refusal({**values, "rewards": entry()})
    found = {**values, "rewards": entry(tokenizer=str(tmp_path))}
    assert refusal(found).startswith(f"rewards.functions.1.kwargs.tokenizer: found '{tmp_path} without tokenizer.json'")
    check(parse_experiment(merged(values) | {"rewards": entry(tokenizer=str(model))}))
