"""Tokens in, tokens out: a conversation keeps what was sampled and what was told, each token once."""

from __future__ import annotations

import asyncio
import copy
from contextlib import suppress
from typing import Any

import pytest

from fp8rl.rollout.tasks.environments.branch import ConversationOverError
from fp8rl.rollout.tasks.environments.conversation import Conversation, Turn, transcript
from fp8rl.rollout.types import Group, Problem, Prompt, SamplingParams, Trajectory
from tests.support.conversations import EOS, Model, Stage, ids


def test_a_conversation_is_the_models_tokens_and_the_environments_in_their_order(play: Stage, tokenizer: Any) -> None:
    turns: list[Turn] = []

    async def environment(conversation: Conversation) -> None:
        turns.append(await conversation.sample(stop=["="]))
        conversation.tell("13")
        conversation.tell(")")
        turns.append(await conversation.sample(max_new_tokens=2))
        conversation.tell(".")
        turns.append(await conversation.sample(stop=EOS))
        conversation.tell("nobody answers this")

    answer = play(environment, "(9+4=99", ",77", "8" + EOS)
    assert answer.token_ids == ids(tokenizer, "(9+4=13),7.8" + EOS)
    assert answer.environment_spans == ((5, 8), (10, 11))
    sampled = ids(tokenizer, "(9+4=,78" + EOS)
    assert answer.logprobs == [-float(token) for token in sampled], "those that the engine gave"
    assert answer.weight_versions == [1] * 5 + [2] * 2 + [3] * 2
    assert (answer.finished, answer.stopped, answer.seed) == (True, True, 7)
    assert [(turn.text, turn.ended_by) for turn in turns] == [("(9+4", "="), (",7", None), ("8", EOS)]
    assert play.model is not None
    asked = play.model.asked
    prefixes = ["1+2=?", "1+2=?(9+4=13)", "1+2=?(9+4=13),7."]
    assert [prompt for prompt, _, _ in asked] == [ids(tokenizer, text) for text in prefixes], "never tokenized again"
    assert [seed for _, seed, _ in asked] == [7, 7, 7], "a draw goes by the position too"
    assert [sampling.max_new_tokens for _, _, sampling in asked] == [64, 2, 64 - 11]
    assert transcript(answer, tokenizer) == [
        *(("model", "(9+4="), ("environment", "13)"), ("model", ",7"), ("environment", "."), ("model", "8"))
    ]


def test_a_bounded_turn_has_its_last_token_in_its_text_and_a_stop_is_one_token(play: Stage, tokenizer: Any) -> None:
    async def environment(conversation: Conversation) -> None:
        with pytest.raises(ValueError, match="found '==', which is 2 tokens, expected one"):
            await conversation.sample(stop="==")
        with pytest.raises(ValueError, match="max_new_tokens: found -3, expected 1 or more"):
            await conversation.sample(max_new_tokens=-3)
        await conversation.sample(max_new_tokens=1)

    answer = play(environment, "57")
    assert (answer.finished, answer.stopped) == (True, False)
    assert transcript(answer, tokenizer) == [("model", "5")]


@pytest.mark.parametrize(("room", "tokens", "told"), [(4, "(9+4", ()), (6, "(9+4=", ()), (9, "(9+4=13),", ((5, 8),))])
def test_an_answer_ends_where_its_tokens_do_whoever_would_speak(
    play: Stage, tokenizer: Any, room: int, tokens: str, told: tuple[tuple[int, int], ...]
) -> None:
    async def environment(conversation: Conversation) -> None:
        while True:
            await conversation.sample(stop=["="])
            conversation.tell("13)")

    answer = play(environment, "(9+4=", ",,", max_new_tokens=room)
    assert answer.token_ids == ids(tokenizer, tokens) and answer.environment_spans == told
    assert not answer.finished and len(answer.token_ids) <= room


def test_an_error_of_the_engine_is_not_hidden_by_an_environment_that_catches_everything(play: Stage) -> None:
    async def environment(conversation: Conversation) -> float:
        try:
            await conversation.sample()
        except Exception:
            pass
        return 1.0

    with pytest.raises(IndexError):
        play(environment)  # a model without a line


@pytest.mark.slow
def test_the_time_of_an_environment_is_bounded_and_that_of_the_engine_is_not_its_own(tokenizer: Any) -> None:
    async def run(environment_s: float, engine_s: float, patience_s: float | None = None) -> None:
        async def sampler(group: Group, sampling: SamplingParams) -> Trajectory:
            await asyncio.sleep(engine_s)
            return Trajectory(group.prompt.token_ids, [5], [-1.0], False, [0], 0, 1)

        async def environment(conversation: Conversation) -> None:
            with suppress(TimeoutError):
                await asyncio.wait_for(conversation.sample(max_new_tokens=1), patience_s)
            await asyncio.sleep(environment_s)

        prompt = Prompt(Problem("?", "!"), [1])
        await Conversation(prompt, 1, SamplingParams(8), sampler, tokenizer, timeout_s=0.2).run(environment)

    asyncio.run(run(environment_s=0.0, engine_s=0.5))
    with pytest.raises(TimeoutError):
        asyncio.run(run(environment_s=5.0, engine_s=0.0))
    with pytest.raises(TimeoutError):  # also behind a turn for which it has not waited
        asyncio.run(run(environment_s=5.0, engine_s=60.0, patience_s=0.05))


def test_an_environment_may_begin_with_messages_of_its_own(play: Stage, tokenizer: Any) -> None:
    async def environment(conversation: Conversation) -> float:
        conversation.begin([{"role": "system", "content": "?"}, {"role": "user", "content": "2"}])
        await conversation.sample()
        with pytest.raises(ValueError, match="expected it before sample"):
            conversation.begin([{"role": "user", "content": "3"}])
        return 1.0

    answer = play(environment, "4" + EOS)
    assert tokenizer.decode(answer.prompt_ids) == "<|system|>?<|user|>2<|assistant|>" and answer.seed == 7


def test_a_turn_that_outlives_its_conversation_changes_no_row_and_no_other_is_asked_for(tokenizer: Any) -> None:
    model, held, asked = Model(tokenizer, "4", "5" + EOS), asyncio.Event(), asyncio.Event()

    async def slow(group: Group, sampling: SamplingParams) -> Trajectory:
        turn = await model(group, sampling)
        if len(model.asked) > 1:
            asked.set()
            await held.wait()
        return turn

    late: list[asyncio.Future[Any]] = []

    async def environment(conversation: Conversation) -> None:
        await conversation.sample(max_new_tokens=1)
        late.append(asyncio.ensure_future(conversation.sample()))
        await asked.wait()

    async def run() -> None:
        prompt = Prompt(Problem("?", "!"), [9])
        conversation = Conversation(prompt, 7, SamplingParams(64), slow, tokenizer, timeout_s=5.0)
        await conversation.run(environment)
        row = conversation.trajectories({})[0]
        before = copy.deepcopy(row)
        held.set()
        late.append(asyncio.ensure_future(conversation.sample()))
        ends = await asyncio.gather(*late, return_exceptions=True)
        assert [type(each) for each in ends] == [ConversationOverError] * 2
        assert row == before == conversation.trajectories({})[0] and len(row.logprobs) == len(row.token_ids) == 1
        assert len(model.asked) == 2
        conversation._main.append_turn(Trajectory([9], [4], [-1.0], True, [1], 0, 7))
        assert row == before, "a row that was given away is nobody else's"

    asyncio.run(run())
