"""Tokenizers and chat templates that cannot serve a run are refused before anything starts."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from fp8rl.cli import app
from fp8rl.rl.experiment.preconditions import tokenizer as tokenizer_module
from fp8rl.rl.experiment.preconditions.tokenizer import template_remarks
from fp8rl.rollout.tasks.data import Source
from tests.support.chat_templates import KINDS, with_template
from tests.support.preconditions import edit_config, refusal


@pytest.mark.parametrize(("key", "named"), [("eos_token", "without eos_token"), ("chat_template", "chat template")])
def test_a_tokenizer_that_cannot_render_or_end_is_refused(values, model, key, named):
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config[key]
    path.write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    text = refusal(values)
    assert text.startswith("model.path: tokenizer") and named in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for message in messages", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than"),
        ("{{ '%3000000000d' % 1 }}{{ messages[0].content }}", "it took more than 1024 MiB"),
        ("{{ messages[0].content * 20000000 }}", "100000000 characters"),
        ("{{ nothing_of_this_name }}", "renders two questions alike"),
    ],
)
def test_a_chat_template_that_renders_no_question_is_refused(values, model, monkeypatch, template, said):
    monkeypatch.setattr(tokenizer_module, "_SECONDS", 0.5)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    text = refusal(values)
    assert text.startswith("model.path: tokenizer") and said in text
    out = model.parent / "converted"
    result = CliRunner().invoke(app, ["convert", str(model), str(out)])
    assert result.exit_code == 2 and "MODEL: tokenizer" in result.stderr and said in result.stderr
    assert not out.exists()


def test_a_broken_tokenizer_and_one_of_another_model_are_refused(values, model):
    edit_config(model, vocab_size=100)
    text = refusal(values)
    assert "tokenizer of 128 tokens" in text and "vocab_size = 100" in text
    (model / "tokenizer.json").write_text("{}")
    assert "cannot be read" in refusal(values)


QUESTION = [{"role": "user", "content": "1+2=?"}]


def remarks(tokenizer: Any, template: str, *, several_turns: bool = True, **options: Any) -> list[str]:
    tokenizer = with_template(tokenizer, KINDS["qwen3"])
    tokenizer.chat_template = template
    source = Source("train.jsonl", "data.train", chat_template=options)
    return list(template_remarks(tokenizer, QUESTION, source, several_turns))


@pytest.mark.parametrize("name", ["chatml", "glm", "kimi", "gemma", "mistral"])
def test_nothing_is_said_of_a_template_that_continues_what_it_wrote(tokenizer: Any, name: str) -> None:
    assert remarks(tokenizer, KINDS[name].template) == []


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for m in messages %}\n"
            "{% set said = m.content if loop.last else m.content.split('</think>')[-1] %}\n"
            "{{ '<|im_start|>' + m.role }}\n{{ said + '<|im_end|>' }}\n{% endfor %}",
            "leaves thoughts out of earlier turns",
        ),
        (
            "{% for m in messages %}\n{{ '<|im_start|>' }}\n{{ messages | length }}\n{{ m.content }}\n{% endfor %}",
            "changes earlier text",
        ),
        (
            "{% if messages | length > 1 %}{{ raise_exception('one question') }}{% endif %}{{ messages[0].content }}",
            "data.train: the chat template cannot render a user message after the model's turn: one question",
        ),
    ],
)
def test_what_a_template_does_to_earlier_turns_is_said(tokenizer: Any, template: str, expected: str) -> None:
    (said,) = remarks(tokenizer, template)
    assert expected in said
    assert "thoughts" not in said or remarks(tokenizer, template, several_turns=False) == []


def test_the_date_that_prompts_have_is_said(tokenizer: Any) -> None:
    (said,) = remarks(tokenizer, KINDS["llama"].template)
    assert "prompts of a run all have 01 January 2025" in said
    assert remarks(tokenizer, KINDS["llama"].template, date_string="26 Jul 2024") == []
