"""Tokenizers and chat templates that cannot serve a run are refused before anything starts."""

import json

import pytest
from typer.testing import CliRunner

from fp8rl.cli import app
from fp8rl.rl.experiment.preconditions import tokenizer
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
        ("{{ messages[0].content.no.such }}", "UndefinedError"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than"),
        ("a fixed prompt", "renders two questions alike"),
        ("{{ nothing_of_this_name }}", "renders two questions alike"),
    ],
)
def test_a_chat_template_that_renders_no_question_is_refused(values, model, monkeypatch, template, said):
    monkeypatch.setattr(tokenizer, "RENDER_SECONDS", 0.5)
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
