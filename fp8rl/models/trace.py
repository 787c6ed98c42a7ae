"""Records what each op of a model's program writes, on either side.

The trainer records its ops. The engine runs each of its ops on the values of this recording (`on_recorded`), and then
its whole program on its own values. A recording maps names to tensors. `site:name` is a value that an op wrote; its
first axis is the tokens [T] of some sequences, end to end. Other names are those below, TOKENS, and the ops' constants
(`program.constants`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.program import CHOSEN, TOKENS, Forward, OpSite
from fp8rl.numerics.backend import dispatch

TARGETS, LENGTHS = "targets", "lengths"
"""int64: the token after each token [T], 0 at a sequence's end; lengths [sequences]."""
TEMPERATURE = "temperature"
EACH = "each"
"""The name under which each expert's term of a token's sum is recorded, [T, k, H], in addition to the op's output."""
PROBS = "probs"
"""Each token's probabilities of its experts, in the order of CHOSEN. A recording has them for all experts, [T, E]."""


class Trace:
    """Records a program's ops while it watches them (`dispatch.watched`).

    names: the values to record; None: all, and EACH. as_recorded: brings a value of an op, by its name, into the form
    of a recording; by default it is in this form.
    """

    def __init__(
        self,
        names: Collection[str] | None = None,
        as_recorded: Callable[[OpSite, str, Any], Tensor] = lambda site, name, value: value,
    ) -> None:
        self._names, self._as_recorded = names, as_recorded
        self._parts: dict[str, list[Tensor]] = defaultdict(list)

    def recording(self) -> dict[str, Tensor]:
        """Return what was recorded so far. Values of several passes are end to end."""
        return {key: torch.cat(parts) for key, parts in self._parts.items()}

    def __call__(self, op: str, given: Mapping[str, Any], made: Any) -> None:
        if op != dispatch.PROGRAM:
            return
        site: OpSite = dispatch.place
        written = {name: self._as_recorded(site, name, value) for name, value in zip(site.op.writes, made)}
        if CHOSEN in written:
            (logits,), chosen = given["read"], written[CHOSEN]
            every = written[PROBS].new_zeros(len(chosen), logits.shape[-1])
            written |= {PROBS: every.scatter(1, chosen.long(), written[PROBS]), CHOSEN: chosen.int()}
        if CHOSEN in site.op.reads and self._names is None:
            x, probs, chosen = given["read"][:3]
            alone = torch.eye(chosen.shape[1], device=chosen.device)
            each = [given["host"].experts(site, x, probs * only, chosen) for only in alone]
            written[EACH] = torch.stack([self._as_recorded(site, EACH, share) for share in each], 1)
        for name, value in written.items():
            if self._names is None or name in self._names:
                self._parts[site.key(name)].append(value.detach().to("cpu", copy=True))


def on_recorded(forward: Forward, recording: Mapping[str, Tensor]) -> Iterator[tuple[OpSite, dict[str, Any]]]:
    """Yield each op with the recorded values that were written before it."""
    values: dict[str, Any] = {TOKENS: recording[TOKENS]}
    for site in forward.sites():
        yield site, dict(values)
        values |= {name: recording[site.key(name)] for name in site.op.writes}
        if CHOSEN in site.op.writes:
            values[PROBS] = values[PROBS].gather(1, values[CHOSEN].long())
