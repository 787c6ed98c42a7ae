"""A row of a conversation: tokens of the model and of the environment. A row can only grow."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fp8rl.rollout.types import KeptTokens, Trajectory


class ConversationOverError(Exception):
    """An answer has used up its tokens. An environment need not catch this error."""


@dataclass(eq=False)
class Branch:
    """One row of a conversation. Most conversations have only one. A program opens another row if it changes earlier
    messages, or if it talks to the model as several agents."""

    prompt_ids: list[int]
    """[P], the prompt. In this row the prompt's tokens are not trained on."""
    seed: int
    """The seed of all draws of the row. A draw also depends on its position."""
    limit: int
    """Largest number of tokens that model and environment together may put after the prompt."""
    tokens: list[int] = field(default_factory=list)
    """[T], the tokens after the prompt."""
    turns: int = 0
    """The number of the model's turns."""
    truncated: bool = False
    """Whether the row has used up its tokens."""
    _logprobs: list[float] = field(default_factory=list)
    _weight_versions: list[int] = field(default_factory=list)
    _environment_spans: list[tuple[int, int]] = field(default_factory=list)
    _routes: Tensor | None = None
    _supports: KeptTokens | None = None
    _stopped: bool = False

    @property
    def remaining(self) -> int:
        return self.limit - len(self.tokens)

    @property
    def ids(self) -> list[int]:
        """All tokens of the row, [P + T]."""
        return self.prompt_ids + self.tokens

    def append_turn(self, turn: Trajectory, *, length: int | None = None, stops: tuple[int, ...] = ()) -> None:
        """Append a turn of the model, from the engine's answer.

        length: append only the first `length` tokens. stops: tokens that end the turn, but not the answer.
        """
        count = len(turn.token_ids) if length is None else length
        finished = turn.finished and count == len(turn.token_ids)
        self.tokens += turn.token_ids[:count]
        self._logprobs += turn.logprobs[:count]
        self._weight_versions += turn.weight_versions[:count]
        # An expert is chosen for every token but the last.
        self._routes = turn.routed_experts if turn.routed_experts is None else turn.routed_experts[: len(self.ids) - 1]
        if turn.supports is not None:
            supports = turn.supports.first(count)
            self._supports = supports if self._supports is None else self._supports.then(supports)
        self.turns += 1
        self._stopped = finished and turn.token_ids[-1] not in stops
        self.truncated = not finished and self.remaining < 1

    def append_environment(self, ids: list[int], at: int | None = None) -> None:
        """Append tokens of the environment. at: where they begin, if they replace the environment's last tokens.

        Raises ConversationOverError: there is no room for the tokens.
        """
        if at is not None:
            del self.tokens[at:]
            self._environment_spans = [(begin, min(end, at)) for begin, end in self._environment_spans if begin < at]
        self.truncated = len(ids) >= self.remaining  # with one token left there is nothing to answer with
        if self.truncated:
            raise ConversationOverError
        spans, begin = self._environment_spans, len(self.tokens)
        if spans and spans[-1][1] == begin:
            begin = spans.pop()[0]
        self.tokens += ids
        spans.append((begin, len(self.tokens)))

    def trajectory(self, outcome: dict[str, float], *, failed: bool = False, number: int = 0) -> Trajectory:
        """Return the row as a trajectory. Tokens of the environment after the model's last turn are left out."""
        length, spans = len(self.tokens), list(self._environment_spans)
        if spans and spans[-1][1] == length:
            length = spans.pop()[0]
        return Trajectory(
            prompt_ids=self.prompt_ids,
            token_ids=self.tokens[:length],
            logprobs=[*self._logprobs],
            finished=not self.truncated,
            stopped=self._stopped,
            weight_versions=[*self._weight_versions],
            group=0,
            seed=self.seed,
            routed_experts=self._routes,
            supports=self._supports,
            environment_spans=tuple(spans),
            outcome=outcome,
            failed=failed,
            branch=number,
        )
