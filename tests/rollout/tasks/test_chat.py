"""Conversations are rendered as the chat template writes them whole; the oracle is the template itself."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from fp8rl.numerics.core.errors import UserError
from fp8rl.rollout.tasks.chat import KEYS_OF_THOUGHTS, ROLES, answer_ids, continuation_ids, end_ids, prompt_ids, render
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.tasks.environments.recording import Recording
from fp8rl.rollout.tasks.openai import Refusal, read_request
from fp8rl.rollout.types import Problem, Prompt, SamplingParams, Trajectory
from tests.support.chat_templates import KINDS, Kind, with_template
from tests.support.conversations import Model, rows_of
from tests.support.conversations import ids as tokens
from tests.support.paths import EXAMPLES

Messages = list[dict[str, Any]]
USER = {"role": "user", "content": "1+2=?"}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    plain = AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe")
    return {name: with_template(plain, kind) for name, kind in KINDS.items()}


def changed(tokenizer: Any, old: str, new: str) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = other.chat_template.replace(old, new)
    return other


def whole(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    """What the template writes for a whole conversation, on the date that prompts have."""
    options = {"strftime_now": lambda form: {"%d %b %Y": "01 Jan 2025"}[form], **options}
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
    return tokens(tokenizer, text)


def played(tokenizer: Any, environment: Any, model: Any, messages: Messages, options: Any = None) -> Trajectory:
    problem = Problem("?", "!", messages, chat_template=options or {})
    prompt = Prompt(problem, prompt_ids(tokenizer, messages, options))
    return rows_of(tokenizer, environment, model, prompt, 4000)[0]


def words(draws: random.Random) -> str:
    return "".join(draws.choice("abc=+ \n19") for _ in range(draws.randrange(5))).strip() + draws.choice("xyz")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_random_conversations_have_the_tokens_that_the_template_writes(tokenizers: dict[str, Any], name: str) -> None:
    """Turns end by themselves, are cut, or are stopped and go on; messages come first, in rows, and of tools."""
    for seed in range(40):
        check_random(tokenizers[name], KINDS[name], random.Random(f"{name}{seed}"))


def check_random(tokenizer: Any, kind: Kind, draws: random.Random) -> None:
    said: Messages = [{"role": "system", "content": words(draws)}] * (kind.system and draws.random() < 0.3) + [USER]
    begun, lines = list(said), []

    async def environment(conversation: Conversation) -> None:
        if kind.rows and draws.random() < 0.3:
            put(conversation, "user")
        for _ in range(draws.randrange(1, 4)):
            text, end, lead = words(draws), kind.end or "<|user|>", kind.lead
            ending = draws.choice(["itself", "itself", "cut", "stopped"])
            if ending == "itself":
                lines.append(lead + text + end)
                await conversation.sample()
            elif ending == "cut":
                lines.append(lead + text + "zzzz" + end)
                await conversation.sample(max_new_tokens=len(tokens(tokenizer, lead + text)))
            else:
                lines.append(lead + text + "#zzzz" + end)
                await conversation.sample(stop=["#"])
                conversation.tell(told := "7" * draws.randrange(3))
                text = f"{text}#{told}"
            said.append({"role": "assistant", "content": text})
            role = draws.choice(["user", "tool"]) if kind.tools and (kind.end or ending != "itself") else "user"
            for _ in range(draws.randrange(1, 4) if kind.rows else 1):
                put(conversation, role)
        lines.append("q")
        await conversation.sample(max_new_tokens=1)

    def put(conversation: Conversation, role: str) -> None:
        said.append({"role": role, "content": words(draws)})
        conversation.message(role, said[-1]["content"])

    model = Model(tokenizer)
    model.lines = lines
    answer = played(tokenizer, environment, model, begun)
    row = answer.prompt_ids + answer.token_ids
    assert all(row[: len(prompt)] == prompt for prompt, _, _ in model.asked)
    assert tokenizer.decode(row[:-1]) == tokenizer.decode(whole(tokenizer, said))
    assert row[:-1] == whole(tokenizer, said)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_histories_with_thoughts_calls_and_odd_roles_are_the_template_s(tokenizers: dict[str, Any], name: str) -> None:
    async def checked() -> list[str]:
        return [
            await check_history(tokenizers[name], KINDS[name], random.Random(f"{name}{seed}")) for seed in range(30)
        ]

    found = Counter(asyncio.run(checked()))
    assert found["continued"] and (found["refused"] or name == "kimi")


async def check_history(tokenizer: Any, kind: Kind, draws: random.Random) -> str:
    """Data and a program bring a history; then the program splits the model's thoughts off, and goes on."""
    roles = [role for role in ("system", "developer") if draws.random() < 0.2]
    said: Messages = [{"role": role, "content": words(draws)} for role in roles]
    for _ in range(draws.randrange(1, 3)):
        role = "user" if draws.random() < 0.95 else draws.choice(["human", "Function", "asistant"])
        turn: dict[str, Any] = {"role": "assistant", "content": words(draws)}
        if draws.random() < 0.3:
            turn |= dict.fromkeys(draws.sample(KEYS_OF_THOUGHTS[:3], draws.randrange(1, 3)), words(draws))
        said += [{"role": role, "content": words(draws)}, turn]
        if kind.tools and draws.random() < 0.3:
            calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
            said[-1] = {**turn, "tool_calls": calls}
            said += [{"role": "tool", "tool_call_id": "c", "content": words(draws)}, turn]
    said.append({"role": "user", "content": words(draws)})
    model = Model(tokenizer)
    prompt = Prompt(Problem("?", "!"), [])
    sampling = SamplingParams(4000, stop_token_ids=end_ids(tokenizer))
    conversation = Conversation(prompt, 7, sampling, model, tokenizer, 60.0, longest=9000)
    await conversation._scope.__aenter__()  # as while it is played: Python 3.11.2 moves no deadline before
    recording = Recording(conversation, None, 9)

    async def answered() -> list[int]:
        """What the model was asked with, for the history that a program has sent."""
        body = json.dumps({"model": "policy", "messages": said}).encode()
        await recording.answer(read_request(body, True, sampling, (), 1000))
        return model.asked[-1][0]

    try:
        expected = whole(tokenizer, known_to(kind, said))
    except (jinja2.TemplateError, LookupError):
        with pytest.raises((jinja2.TemplateError, UserError)):
            prompt_ids(tokenizer, said)
        with pytest.raises(Refusal):
            await answered()
        return "refused"
    assert prompt_ids(tokenizer, said) == expected
    if any(message["role"] not in ROLES for message in said):
        return "written"
    thought, content = words(draws) if kind.thoughts and draws.random() < 0.5 else "", words(draws)
    written = f"<think>\n{thought}\n</think>\n\n{content}" if thought else content
    model.lines = [kind.lead + written + (kind.end or "<|user|>"), "q"]
    assert await answered() == expected
    row = expected + tokens(tokenizer, kind.lead + written + (kind.end or "<|user|>"))
    said.append({"role": "assistant", "content": content} | ({"reasoning": thought} if thought else {}))
    said.append({"role": "user", "content": words(draws)})
    begun, expected = await answered(), whole(tokenizer, known_to(kind, said))
    if expected[: len(row)] != row:  # the template shows less of what was said
        return "written"
    assert begun == expected
    return "continued"


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        ({"reasoning": "a", "reasoning_details": [{"type": "reasoning.text", "text": "a"}]}, None),
        ({"reasoning_content": "", "reasoning": "a", "thinking": None, "thinking_blocks": []}, None),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}, "reasoning_details: found"),
        ({"reasoning": "a", "thinking": "b"}, "reasoning, thinking: found"),
        ({"thinking": ["a"]}, "thinking: found"),
        ({"role": "user", "reasoning": "a"}, "reasoning: found ['a'], expected one text, in an assistant's message"),
    ],
)
def test_thoughts_are_one_text_or_refused(tokenizers: dict[str, Any], turn: dict[str, Any], found: str | None) -> None:
    history = [USER, {"role": "assistant", "content": "2", **turn}, {"role": "tool", "content": "3"}]
    body = json.dumps({"model": "policy", "messages": history}).encode()
    if found is None:
        text = render(tokenizers["qwen3"], history, {}, answer=True)
        assert "<think>\na\n</think>\n\n2<|im_end|>" in text
        (_, read, _) = read_request(body, True, SamplingParams(9), (), 9).messages
        assert render(tokenizers["qwen3"], [history[0], read, history[2]], {}, answer=True) == text
    else:
        with pytest.raises(UserError, match=re.escape(found)):
            prompt_ids(tokenizers["qwen3"], history)
        with pytest.raises(Refusal, match=re.escape("messages.1: " + found)):
            read_request(body, True, SamplingParams(9), (), 9)


def known_to(kind: Kind, messages: Messages) -> Messages:
    """The messages as a template of this kind reads them. Raises LookupError: it would leave some of them out."""
    found = []
    for number, message in enumerate(messages):
        role = kind.developer if message["role"] == "developer" else message["role"]
        thoughts = next((message[key] for key in KEYS_OF_THOUGHTS if key in message), "")
        begins = kind is KINDS["gpt-oss"] and role in ("system", "developer")
        if (role not in ROLES and not kind.others) or (thoughts and not kind.thoughts) or (begins and number):
            raise LookupError
        calls = [{**call, "function": {"name": "f", "arguments": {}}} for call in message.get("tool_calls", ())]
        read = {kind.thoughts: thoughts} if thoughts else {}
        found.append({"role": role, "content": message["content"], "tool_calls": calls, **read})
    return found


@pytest.mark.parametrize("name", KINDS)
def test_the_model_s_turn_ends_where_the_template_ends_it(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer, kind = tokenizers[name], KINDS[name]
    ends = [tokenizer.decode(token) for token in end_ids(tokenizer)]
    assert ends[0] == (kind.end or "<|user|>") and kind.eos in ends
    assert ("<|observation|>" in ends) == (name == "glm")


@pytest.mark.parametrize("name", KINDS)
def test_a_supervised_answer_has_the_tokens_that_the_template_writes(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer, kind = tokenizers[name], KINDS[name]
    row = prompt_ids(tokenizer, [USER]) + answer_ids(tokenizer, [USER], "#### 3", {})
    next_turn = [USER] * (name != "qwen3")  # which leaves its empty thoughts out of an earlier turn
    written = whole(tokenizer, [USER, {"role": "assistant", "content": "#### 3"}, *next_turn])
    assert tokenizer.decode(row) == tokenizer.decode(written[: len(row)])
    assert tokenizer.decode(row).endswith("#### 3" + (kind.end or "<|user|>"))


def test_thoughts_that_the_prompt_has_begun_go_on_in_a_supervised_answer(tokenizers: dict[str, Any]) -> None:
    """A template that opens every turn with <think> and leaves thoughts out of what was said, as DeepSeek-R1's does."""
    tokenizer = copy.deepcopy(tokenizers["chatml"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    )
    row = prompt_ids(tokenizer, [USER]) + answer_ids(tokenizer, [USER], "<think>\n1+1\n</think>\n2", {})
    assert tokenizer.decode(row).endswith("<|assistant|><think>\n1+1\n</think>\n2<|im_end|>")
    with pytest.raises(UserError, match="answer: found no thoughts, expected"):
        answer_ids(tokenizer, [USER], "2", {})


@pytest.mark.parametrize("end", ["[EOS]", "<|im_end|>[EOS]"])
def test_an_end_that_the_template_does_not_know_is_followed_by_its_own(tokenizers: dict[str, Any], end: str) -> None:
    """An engine ends also at the tokens of generation_config.json."""
    tokenizer = tokenizers["kimi"]
    turn = tokens(tokenizer, "x" + end)
    ids = continuation_ids(tokenizer, [USER], turn, [{"role": "user", "content": "again"}], {})
    after = "<|im_user|>user<|im_middle|>again<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert tokenizer.decode(ids) == ("" if "im_end" in end else "<|im_end|>") + after


@pytest.mark.parametrize("name", ["chatml", "glm", "kimi"])
def test_results_of_several_calls_follow_as_the_template_writes_them(tokenizers: dict[str, Any], name: str) -> None:
    """What the model has said to call tools stays; a template may read the calls' names and ids."""
    tokenizer = tokenizers[name]
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "add", "arguments": ""}} for i in range(2)]
    results = [{"role": "tool", "content": f"R{i}", "name": "add"} for i in range(2)]
    spoken = {"role": "assistant", "content": "so", "tool_calls": calls}
    end = KINDS[name].end or "<|observation|>"
    text = render(tokenizer, [USER, spoken], {}, answer=False)
    turn = text.removeprefix(render(tokenizer, [USER], {}, answer=True)).removesuffix("\n").removesuffix(end) + end
    ids = continuation_ids(tokenizer, [USER], tokens(tokenizer, turn), results, {}, calls)
    row = prompt_ids(tokenizer, [USER]) + tokens(tokenizer, turn) + ids
    assert tokenizer.decode(row) == render(tokenizer, [USER, spoken, *results], {}, answer=True)


@pytest.mark.parametrize("form", ["{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"])
@pytest.mark.parametrize("given", [{"a": "é"}, '{"a": "é"}', {}, "", None])
def test_arguments_are_objects_or_text_as_templates_have_it(tokenizers: dict[str, Any], form: str, given: Any) -> None:
    """DeepSeek's templates join them to a text. Others pass them to a filter, which would quote a text again."""
    tokenizer = changed(tokenizers["chatml"], "'(call ' + c.function.name + ')'", f"'@' }}}}{form}{{{{ '@'")
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}]
    spoken = {"role": "assistant", "content": "so", "tool_calls": calls}
    result = {"role": "tool", "content": "R"}
    text = render(tokenizer, [USER, spoken, result], {}, answer=True)
    assert text.count("@" + ('{"a": "é"}' if given else "{}") + "@") == 1
    behind = continuation_ids(tokenizer, [USER], tokens(tokenizer, "so<|im_end|>"), [result], {}, calls)
    assert tokenizer.decode(behind) == text.rpartition("@<|im_end|>")[2]


@pytest.mark.parametrize("content", [None, "", []])
def test_content_is_text_or_null_as_the_template_reads_it(tokenizers: dict[str, Any], content: Any) -> None:
    """As DeepSeek-V3's and R1's do."""
    calls_or_text = "(m.tool_calls[0].function.name if m.content is none else m.content)"
    tokenizer = changed(tokenizers["deepseek"], "m.content.split('</think>')[-1]", calls_or_text)
    asked = {"role": "user", "content": [{"type": "text", "text": text} for text in ("1+", "2=?")]}
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]
    history = [asked, {"role": "assistant", "content": content, "tool_calls": calls}, {"role": "tool", "content": "R"}]
    assert "<|User|>1+2=?<|Assistant|>f<|end|><|outputs_begin|>" in render(tokenizer, history, {}, answer=True)
    with pytest.raises(UserError, match="tool_calls: found .*, expected none, which the chat template omits"):
        render(tokenizers["llama"], history, {}, answer=True)


@pytest.mark.parametrize("none", [[], None])
def test_an_empty_list_of_calls_is_none(tokenizers: dict[str, Any], none: Any) -> None:
    """Mistral's template writes calls in place of the content wherever the key is there."""
    calls = "{% elif m.tool_calls is defined %}{{ '(calls)' }}"
    tokenizer = changed(tokenizers["mistral"], "{% else %}", calls + "{% else %}")
    history = [USER, {"role": "assistant", "content": "so", "tool_calls": none}, USER]
    assert "so</s>" in render(tokenizer, history, {}, answer=True)


def talk(*roles: str) -> Any:
    """An environment in which a message of each role follows a turn of the model, and another turn follows the last."""

    async def environment(conversation: Conversation) -> None:
        for role in roles:
            await conversation.sample()
            conversation.message(role, "again")
        await conversation.sample()

    return environment


def test_arguments_of_the_template_hold_in_every_turn(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["qwen3"]
    model = Model(tokenizer, "x<|im_end|>", "y<|im_end|>")
    answer = played(tokenizer, talk("user"), model, [USER], {"enable_thinking": False})
    opening = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(answer.prompt_ids + answer.token_ids).count(opening) == 2


def test_thoughts_stay_in_the_row_where_the_template_would_drop_them_later(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["qwen3"]
    lines = [f"<think>\n{i}\n</think>\n\nx<|im_end|>" for i in range(3)]
    answer = played(tokenizer, talk("tool", "user"), Model(tokenizer, *lines), [USER])
    text = tokenizer.decode(answer.prompt_ids + answer.token_ids)
    assert all(line in text for line in lines)
    assert text.count("<|im_start|>") == text.count("<|im_end|>") == 6


REWRITING = {
    "moves the system prompt": "{% for m in messages if m.role != 'system' %}{% if loop.last %}"
    "{{ messages[0].content }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}",
    "shows the last turn alone": "{{ messages[0].content if messages[0].role == 'system' }}{{ messages[-1].content }}",
}


@pytest.mark.parametrize("template", REWRITING.values(), ids=REWRITING)
def test_a_template_that_rewrites_what_was_said_is_refused(tokenizers: dict[str, Any], template: str) -> None:
    tokenizer = with_template(tokenizers["chatml"], KINDS["chatml"])
    tokenizer.chat_template = template
    history = [{"role": "system", "content": "be kind"}, USER]
    again = [{"role": "user", "content": "again"}]
    with pytest.raises(UserError, match="changes earlier text when a user message follows"):
        continuation_ids(tokenizer, history, tokens(tokenizer, "x<|im_end|>"), again, {})


def test_a_message_without_room_ends_the_conversation_and_stays_out(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["chatml"]

    async def environment(conversation: Conversation) -> None:
        await conversation.sample()
        conversation.message("user", "a")
        room = conversation.room
        conversation.message("user", "b")
        assert conversation.room < room
        conversation.message("user", "c" * 4000)

    answer = played(tokenizer, environment, Model(tokenizer, "x<|im_end|>"), [USER])
    assert tokenizer.decode(answer.token_ids) == "x<|im_end|>"
    assert answer.environment_spans == () and not answer.finished
