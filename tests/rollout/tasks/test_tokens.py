"""Texts are tokenized as they stand in a row, and tokens have their own text; the oracle is the whole text's tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from fp8rl.rollout.tasks.chat import answer_ids, prompt_ids
from fp8rl.rollout.tasks.environments.conversation import Conversation, Turn, transcript
from fp8rl.rollout.tasks.environments.recording import Recording
from fp8rl.rollout.tasks.openai import CompletionRequest
from fp8rl.rollout.tasks.tokens import behind_ids, text_ids, text_of
from fp8rl.rollout.types import Group, Problem, Prompt, SamplingParams, Trajectory
from tests.support.blanks import BLANKS, TEMPLATES, tokenizer_with_blanks
from tests.support.conversations import ids as tokens
from tests.support.conversations import rows_of
from tests.support.paths import EXAMPLES

USER = {"role": "user", "content": "1+2=?"}
EACH = list(itertools.product(BLANKS, TEMPLATES))


def whole(tokenizer: Any, messages: Sequence[dict[str, str]], ended: bool = False) -> list[int]:
    """What the template writes, tokenized at once. ended: up to the last end of a turn."""
    ids = tokens(tokenizer, tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    return ids[: len(ids) - ids[::-1].index(tokenizer.eos_token_id)] if ended else ids


@dataclass
class Writer:
    """A model that writes what a text has after the row, up to where the engine would end it."""

    tokenizer: Any
    text: list[int] = field(default_factory=list)

    async def __call__(self, group: Group, sampling: SamplingParams) -> Trajectory:
        row = group.prompt.token_ids
        assert self.text[: len(row)] == row, "the row is the beginning of the whole"
        said = self.text[len(row) :][: sampling.max_new_tokens]
        end = next((n for n, token in enumerate(said, 1) if token in sampling.stop_token_ids), None)
        said = said[:end]
        return Trajectory(row, said, [0.0] * len(said), end is not None, [1] * len(said), 0, 7)


def talked(
    tokenizer: Any, messages: list[dict[str, str]], talk: Callable[[Conversation, Writer], Awaitable[object]]
) -> list[Trajectory]:
    writer, prompt = Writer(tokenizer), Prompt(Problem("?", "", list(messages)), prompt_ids(tokenizer, messages))
    return rows_of(tokenizer, lambda it: talk(it, writer), writer, prompt, 2000, longest=4000)


@pytest.mark.parametrize(("where", "name"), EACH)
def test_a_conversation_and_a_supervised_answer_have_the_tokens_of_the_whole(where: str, name: str) -> None:
    """Turns end by themselves, are cut, or are stopped and go on with what is told."""
    tokenizer = tokenizer_with_blanks(where, TEMPLATES[name])
    for seed in range(4):
        draws = random.Random(seed)
        said = [{"role": "user", "content": _words(draws)}]
        answer = [*said, {"role": "assistant", "content": _words(draws)}]
        row = prompt_ids(tokenizer, said) + answer_ids(tokenizer, said, answer[-1]["content"], {})
        assert row == whole(tokenizer, answer, ended=True)
        trajectory, *_ = talked(tokenizer, said, _at_random(tokenizer, said, draws))
        assert trajectory.prompt_ids + trajectory.token_ids[:-1] == whole(tokenizer, said)
        text = tokenizer.decode(trajectory.token_ids[: -1 if trajectory.stopped else None])
        assert "".join(part for _, part in transcript(trajectory, tokenizer)) == text


def _words(draws: random.Random) -> str:
    return "".join(draws.choice("abc=+ 19") for _ in range(draws.randrange(5))).strip() + draws.choice("xyz")


def _at_random(tokenizer: Any, said: list[dict[str, str]], draws: random.Random) -> Any:
    async def talk(conversation: Conversation, writer: Writer) -> None:
        def ask() -> None:
            said.append({"role": "user", "content": _words(draws)})
            conversation.message("user", said[-1]["content"])

        if draws.random() < 0.3:
            ask()
        for _ in range(draws.randrange(1, 4)):
            told = draws.choice([None, "", "7", " 77"])
            turn = {"role": "assistant", "content": _words(draws) + ("" if told is None else "#" + told)}
            writer.text = whole(tokenizer, [*said, turn], ended=True)
            if told is None:
                await conversation.sample()
            else:
                ended = await conversation.sample(stop=["#"])
                assert (ended.ended_by, ended.text.strip()) == ("#", turn["content"].partition("#")[0])
                conversation.tell(told)
            said.append(turn)
            ask()
        writer.text = [*whole(tokenizer, said), tokenizer.eos_token_id]
        await conversation.sample(max_new_tokens=1)

    return talk


@pytest.mark.parametrize("where", BLANKS)
@pytest.mark.parametrize(
    ("rest", "stop", "shown"),
    [
        ("</s>[INST] b [/INST]", (), " 3= 4#5"),
        ("</s><s>c", (), " 3= 4#5"),
        ("9", ("= 4",), " 3"),
        ("[", (" 4#",), " 3="),
    ],
)
def test_text_completions_have_the_tokens_of_the_whole_text(
    where: str, rest: str, stop: tuple[str, ...], shown: str
) -> None:
    tokenizer = tokenizer_with_blanks(where)
    text = tokenizer.apply_chat_template([USER], tokenize=False)

    async def talk(conversation: Conversation, writer: Writer) -> None:
        recording, prompt = Recording(conversation, None, 9), text
        for _ in range(3):
            writer.text = tokens(tokenizer, prompt + " 3= 4#5</s>")
            request = CompletionRequest(max_tokens=None, stop=stop, stream=False, include_usage=False, prompt=prompt)
            assert (await recording.answer(request)).text == shown
            prompt += shown + rest

    rows = talked(tokenizer, [USER], talk)
    question = prompt_ids(tokenizer, [USER])
    assert all(row.prompt_ids[: len(question)] == question == text_ids(tokenizer, text) for row in rows)
    assert len(rows) == (1 if rest.startswith("</s>") else 3), "a row that a text leaves goes on as another"


@pytest.mark.parametrize(
    ("put", "text", "expected"),
    [
        ("<s> $A", "<s>ab", "<s>ab"),
        ("<s> $A </s>", "ab", "<s>ab"),
        ("<s> $A", "<s><s>", "<s><s>"),
        ("<q> <s> $A", "<q><s>ab", "<q><s>ab"),
        ("<q> <s> $A", "<s>ab", "<q><s><s>ab"),
    ],
)
def test_what_is_put_before_a_text_is_there_once(put: str, text: str, expected: str) -> None:
    tokenizer = tokenizer_with_blanks("never")
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>", "<q>") if token in put]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=put, pair="$A $B", special_tokens=special)
    assert text_ids(tokenizer, text) == tokens(tokenizer, expected)


@pytest.mark.parametrize("where", BLANKS)
@pytest.mark.parametrize("text", ["=", " =", "  =", "= =", "</s>", "</s>a", "é=", ""])
def test_a_text_behind_another_is_what_it_would_be_in_the_whole(where: str, text: str) -> None:
    tokenizer = tokenizer_with_blanks(where)
    for before in ("x", "x</s>"):
        row = tokens(tokenizer, before)
        assert row + behind_ids(tokenizer, text, row) == tokens(tokenizer, before + text)
    if "é" not in text:
        assert text_of(tokenizer, behind_ids(tokenizer, text)).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("text", ["x != y", "[1 , 2]", "do n't", " . ? !", "a 's"])
def test_blanks_of_a_text_stay_whatever_the_tokenizer_s_files_say(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe", clean_up_tokenization_spaces=True)
    assert tokenizer.decode(tokens(tokenizer, text)) != text, "as they say it"
    turns: list[Turn] = []

    async def talk(conversation: Conversation, writer: Writer) -> None:
        writer.text = [*prompt_ids(tokenizer, [USER]), *tokens(tokenizer, text + "<|im_end|>")]
        turns.append(await conversation.sample())

    trajectory, *_ = talked(tokenizer, [USER], talk)
    assert [turns[0].text, *(said for _, said in transcript(trajectory, tokenizer))] == [text, text]
