"""What the environment of an answer said of it."""

from collections.abc import Mapping

from fp8rl.rollout.named_functions import ReturnError


def environment(answer: str, outcome: Mapping[str, float], part: str = "reward") -> float:
    """The number `part` of what the environment returned (a number without a name is `reward`); 0 where the answer's
    tokens ran out, so that it returned nothing. Raises ReturnError: it returned others."""
    if part not in outcome and outcome:
        raise ReturnError(f"found an environment that returned {', '.join(outcome)}, expected {part} (kwargs.part)")
    return outcome.get(part, 0.0)
