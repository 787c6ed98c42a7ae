"""Problems with reference answers, and how one becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fp8rl.rollout import chat
from fp8rl.rollout.chat import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Problem:
    """A question and its reference answer, in GSM8K a solution that ends in `#### ` and the result.

    question: as text; of a conversation, its last user turn. messages: the conversation that the model is to answer, a
    system prompt included; empty: the question as one user turn. fields: the data's further columns, as JSON values.
    chat_template: further arguments of the tokenizer's chat template.
    """

    question: str
    answer: str
    messages: Sequence[Message] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    chat_template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The turns that the model is to answer."""
        return [dict(message) for message in self.messages] or [{"role": "user", "content": self.question}]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """The problem's conversation in the tokenizer's chat template, up to where the assistant begins."""
    return chat.prompt_ids(tokenizer, problem.conversation, problem.chat_template)
