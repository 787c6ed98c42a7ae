"""Chat templates of the kinds that published models have, written for these tests, and tokenizers that have them."""

import copy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of template.

    tokens: special ones that it needs. eos: the tokenizer's `eos_token`. end: what ends a turn of the model; empty: the
    token of the role that speaks next. lead: what the model writes first in each turn. rows: messages may follow each
    other. tools, system: it knows such messages. developer: the role under which it writes one of that role. others: it
    writes messages of any role. thoughts: the key under which it reads them; empty: it writes none.
    """

    template: str
    tokens: tuple[str, ...]
    eos: str
    end: str
    lead: str = ""
    rows: bool = True
    tools: bool = True
    system: bool = True
    developer: str = "developer"
    others: bool = True
    thoughts: str = ""


_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)

_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n(result)' + m.content + '(end)' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_CALLS = "{% for c in m.tool_calls or [] %}{{ '(call ' + c.function.name + ')' }}{% endfor %}"

KINDS = {
    "chatml": Kind(
        "{% for m in messages %}{% if m.role == 'tool' %}"
        + _RESULTS
        + "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        + _CALLS
        + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>",
    ),
    # Thoughts stand in the last turn alone, an empty block where it has none.
    "qwen3": Kind(
        "{% set ns = namespace(asked=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        + _RESULTS
        + "{% elif m.role in ('user', 'system') %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% elif m.role == 'assistant' %}{% set said = m.content %}{% set thoughts = '' %}"
        "{% if m.reasoning_content is string %}{% set thoughts = m.reasoning_content %}"
        "{% elif '</think>' in said %}{% set thoughts = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
        "{% if loop.index0 > ns.asked and (loop.last or thoughts) %}"
        "{{ '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ said }}"
        + _CALLS
        + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking | default(true) %}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>"), "<|im_end|>", "<|im_end|>", developer="system",
        others=False, thoughts="reasoning_content",
    ),
    # Every turn keeps its thoughts. What is no user's, model's or system's message is a tool's.
    "reasoning": Kind(
        "{% for m in messages %}{% if m.role == 'system' %}{{ '<|system|>' + m.content }}"
        "{% elif m.role == 'user' %}{{ '<|user|>' + m.content }}{% elif m.role == 'assistant' %}{{ '<|assistant|>' }}"
        "{% if m.reasoning %}{{ '<think>\n' + m.reasoning + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
        + _CALLS
        + "{{ '<|im_end|>' }}{% else %}{{ '<|tool|>' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|im_end|>", "<think>", "</think>"), "<|im_end|>",
        "<|im_end|>", developer="system", others=False, thoughts="reasoning",
    ),
    # A developer's message begins the prompt, and a system's stands in its place. The last turn alone has thoughts.
    "gpt-oss": Kind(
        "{% for m in messages %}{% if loop.first and m.role in ('developer', 'system') %}"
        "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
        "{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
        "{% elif m.role == 'tool' %}{{ '<|start|>tool<|message|>' + m.content + '<|end|>' }}"
        "{% elif m.role == 'assistant' %}{{ '<|start|>assistant' }}"
        "{% if loop.last and not add_generation_prompt and 'thinking' in m %}"
        "{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}"
        "{{ '<|channel|>final<|message|>' + m.content }}"
        + _CALLS
        + "{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"), "<|return|>", "<|end|>",
        lead="<|channel|>final<|message|>", others=False, thoughts="thinking",
    ),
    "llama": Kind(
        "{{ '<|begin_of_text|>' }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
        "{% endif %}{{ '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string }}"
        "{% if messages[0].role == 'system' %}{{ '\n\n' + messages[0].content | trim }}"
        "{% set messages = messages[1:] %}{% endif %}{{ '<|eot_id|>' }}"
        "{% for m in messages %}{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) }}"
        "{{ '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        "<|end_of_text|>", "<|eot_id|>",
    ),
    "glm": Kind(
        "{{ '[gMASK]<sop>' }}{% for m in messages %}"
        "{% if m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
        "{{ '\n(result)' + m.content + '(end)' }}"
        "{% else %}{{ '<|' + m.role + '|>\n' + m.content | trim }}"
        "{% for c in m.tool_calls or [] %}{{ '\n(call ' + c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}{{ ' ' + k + '=' + v | string }}{% endfor %}{{ ')' }}"
        "{% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        "<|endoftext|>", "", lead="\n",
    ),
    # Thoughts stand before calls alone.
    "kimi": Kind(
        "{% for m in messages %}{{ '<|im_' + m.role + '|>' + (m.name or m.role) + '<|im_middle|>' + m.content }}"
        "{% if m.tool_calls %}{{ (m.reasoning_content or '') + '<|calls_begin|>' }}"
        "{% for c in m.tool_calls %}{{ c.id + (c.function.arguments | tojson) }}{% endfor %}{{ '<|calls_end|>' }}"
        "{% endif %}"
        "{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}",
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_tool|>", "<|im_middle|>", "<|im_end|>", "[EOS]",
         "<|calls_begin|>", "<|calls_end|>"),
        "[EOS]", "<|im_end|>", thoughts="reasoning_content",
    ),
    "deepseek": Kind(
        "{{ '<|begin|>' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
        "{% elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}"
        "{% elif m.role == 'tool' %}"
        "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|outputs_begin|>' }}{% endif %}"
        "{{ '<|output|>' + m.content }}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|outputs_end|>' }}{% endif %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}",
        ("<|begin|>", "<|User|>", "<|Assistant|>", "<|end|>", "<|outputs_begin|>", "<|outputs_end|>", "<|output|>"),
        "<|end|>", "<|end|>", developer="system", others=False,
    ),
    "mistral": Kind(
        "{{ '<s>' }}{% for m in messages %}"
        + _ALTERNATE
        + "{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>", rows=False, tools=False, system=False,
    ),
    "gemma": Kind(
        "{{ '<bos>' }}{% set first = '' %}{% if messages[0].role == 'system' %}"
        "{% set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}"
        + _ALTERNATE
        + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}"
        "{{ '\n' + (first if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<end_of_turn>", rows=False, tools=False,
        developer="system",
    ),
    # What has no opening of the model's turn ends with `eos_token`.
    "phi": Kind(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), "<|endoftext|>", "<|end|>",
    ),
}  # fmt: skip


def with_template(tokenizer: Any, kind: Kind) -> Any:
    """Copy a tokenizer, with the tokens and the template of a kind."""
    copied = copy.deepcopy(tokenizer)
    copied.add_special_tokens({"additional_special_tokens": list(kind.tokens)})
    copied.eos_token, copied.chat_template = kind.eos, kind.template
    return copied
