"""An attribution on the console."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.diagnose.attribution.result import Attribution
from fp8rl.rl.record.console import format_difference

SHOWN_OPS = 12
SHOWN_EXPERTS = 8


def rendered(attribution: Attribution, compared: str = "") -> RenderableType:
    """Findings, causes, and the ops and experts that differ most; compared: a sentence on the batch."""
    parts = [
        _findings(attribution),
        Text(compared) if compared else None,
        _causes(attribution),
        _ops(attribution),
        _experts(attribution),
    ]
    lines = [line for part in parts if part is not None for line in (Text(), part)]
    return Group(*lines[1:])


def headline(attribution: Attribution) -> str:
    """What was compared, in one sentence."""
    a = attribution
    if a.abs_diff_mean == a.live_abs_diff_mean == 0.0:
        return (
            f"d = 0 on {a.tokens:,} sampled tokens, and again on the {a.traced_tokens:,} that both sides computed anew."
        )
    mean, again = format_difference(a.abs_diff_mean), format_difference(a.live_abs_diff_mean)
    return (
        f"Mean |d| is {mean} on {a.tokens:,} sampled tokens. Both sides computed the sequences that differ most anew: "
        f"{again} on their {a.traced_tokens:,} tokens."
    )


def _findings(attribution: Attribution) -> RenderableType:
    lines = [Text(f"{n}. {f.text}", style="bold" if n == 1 else "") for n, f in enumerate(attribution.findings, 1)]
    return Group(Text(headline(attribution)), *(lines or [Text("No difference stands out.", style="green")]))


def _causes(attribution: Attribution) -> Table | None:
    if not attribution.causes:
        return None
    table = Table("cause", "mean |d| before", "after", "what was changed", title="one cause at a time")
    for cause in attribution.causes:
        table.add_row(cause.name, format_difference(cause.before), format_difference(cause.after), cause.note)
    return table


def _ops(attribution: Attribution) -> Table | None:
    worst = sorted(attribution.ops, key=lambda op: -op.relative_rms)[:SHOWN_OPS]
    table = Table("layer", "op", "relative RMS", "elements", "largest", title="ops on equal inputs")
    for op in worst:
        if op.relative_rms:
            layer = "" if op.layer is None else str(op.layer)
            table.add_row(layer, op.op, f"{op.relative_rms:.2e}", f"{op.differing:.1%}", f"{op.largest:.2e}")
    return table if table.row_count else None


def _experts(attribution: Attribution) -> Table | None:
    worst = sorted(attribution.experts, key=lambda expert: -expert.relative_rms)[:SHOWN_EXPERTS]
    table = Table("layer", "expert", "tokens", "relative RMS", "mean |d|", "of the rest", title="experts")
    for e in worst:
        if e.relative_rms:
            means = ("" if math.isnan(x) else format_difference(x) for x in (e.abs_diff_mean, e.abs_diff_rest))
            table.add_row(str(e.layer), str(e.expert), str(e.tokens), f"{e.relative_rms:.2e}", *means)
    return table if table.row_count else None
