"""What a user should know of the chat template is said at the start, with the template's line."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from fp8rl.rl.experiment.preconditions.tokenizer import template_remarks
from fp8rl.rollout.data.sources import Source
from tests.support.chat_templates import KINDS, with_template
from tests.support.paths import EXAMPLES

QUESTION = [{"role": "user", "content": "1+2=?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe")


def remarks(tokenizer: Any, template: str, *, several_turns: bool = True, **options: Any) -> list[str]:
    tokenizer = with_template(tokenizer, KINDS["chatml with thinking"])
    tokenizer.chat_template = template
    source = Source("train.jsonl", "data.train", chat_template=options)
    return list(template_remarks(tokenizer, QUESTION, source, several_turns))


@pytest.mark.parametrize("name", ["chatml", "glm", "kimi", "gemma", "mistral"])
def test_nothing_is_said_of_a_template_that_continues_what_it_wrote(tokenizer: Any, name: str) -> None:
    assert remarks(tokenizer, KINDS[name].template) == []


def test_thoughts_that_a_template_drops_are_named_with_its_line(tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}\n"
        "{% set said = m.content if loop.last else m.content.split('</think>')[-1] %}\n"
        "{{ '<|im_start|>' + m.role }}\n"
        "{{ said + '<|im_end|>' }}\n"
        "{% endfor %}"
    )
    (said,) = remarks(tokenizer, template)
    assert "leaves thoughts out of earlier turns (line 4: {{ said + '<|im_end|>' }})" in said
    assert remarks(tokenizer, template, several_turns=False) == []


def test_a_template_that_rewrites_what_was_said_is_named_with_its_line(tokenizer: Any) -> None:
    template = "{% for m in messages %}\n{{ '<|im_start|>' }}\n{{ messages | length }}\n{{ m.content }}\n{% endfor %}"
    (said,) = remarks(tokenizer, template)
    assert "changes what was said before" in said and "(line 3: {{ messages | length }})" in said


def test_a_template_without_a_second_question_says_why(tokenizer: Any) -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('one question') }}{% endif %}{{ messages[0].content }}"
    (said,) = remarks(tokenizer, template)
    assert said == "data.train: the chat template has no user message after the model's turn: one question"


def test_the_date_that_prompts_have_is_said(tokenizer: Any) -> None:
    (said,) = remarks(tokenizer, KINDS["llama"].template)
    assert "prompts of a run all have 01 January 2025" in said
    assert remarks(tokenizer, KINDS["llama"].template, date_string="26 Jul 2024") == []
