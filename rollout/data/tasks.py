"""Problems with reference answers, and their prompts."""

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
    """A question and its reference answer, in GSM8K a solution that ends in `#### ` and the result."""

    question: str
    """The text; of a conversation, its last user turn."""
    answer: str
    """The reference answer."""
    messages: Sequence[Message] = ()
    """The conversation that the model is to answer, a system prompt included; empty: the question as one user turn."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The data's further columns, as JSON values."""
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the tokenizer's chat template."""

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Return the turns that the model is to answer."""
        return [dict(message) for message in self.messages] or [{"role": "user", "content": self.question}]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """Tokenize the problem's conversation by the chat template, up to where the assistant begins."""
    return chat.prompt_ids(tokenizer, problem.conversation, problem.chat_template)
