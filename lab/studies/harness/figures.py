"""Figures as SVG files: one style, the same bytes for the same data, and each says what it was measured on."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#64748b", "#0891b2", "#be185d")
_STYLE: Any = {
    "svg.hashsalt": "fp8rl",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "axes.axisbelow": True,
}


def figure(title: str, columns: int = 1, rows: int = 1, *, width: float = 7.0, height: float = 3.4) -> Figure:
    """An empty figure with `rows` x `columns` axes; inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        drawn = Figure(figsize=(width, height * rows), layout="constrained")
        drawn.subplots(rows, columns)
    drawn.suptitle(title, fontsize=10, x=0.01, ha="left", fontweight="bold")
    return drawn


def bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float, float]]],
    *,
    label: str,
    log: bool = False,
) -> None:
    """Bars with intervals: for each series a (value, low, high) for each group."""
    wide = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        at = [group + (index - (len(series) - 1) / 2) * wide for group in range(len(groups))]
        heights = [value for value, _, _ in values]
        errors = [[value - low for value, low, _ in values], [high - value for value, _, high in values]]
        color = COLORS[index % len(COLORS)]
        axes.bar(at, heights, wide, label=name, color=color)
        axes.errorbar(at, heights, errors, fmt="none", ecolor="#0f172a", elinewidth=0.8, capsize=2)
    slanted: Any = {"rotation": 20, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(groups)), groups, **(slanted if max(map(len, groups)) > 10 else {}))
    axes.set_ylabel(label)
    if log:
        axes.set_yscale("log")
    if len(series) > 1:
        legend(axes)


def curve(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[tuple[float, float, float]],
    *,
    name: str,
    index: int,
    band: bool = True,
    marker: str = "",
) -> None:
    """A line of (value, low, high) with its band; `index` chooses the color."""
    color = COLORS[index % len(COLORS)]
    axes.plot(x, [value for value, _, _ in values], label=name, color=color, marker=marker, markersize=3, linewidth=1.4)
    if band:
        lows, highs = [low for _, low, _ in values], [high for _, _, high in values]
        axes.fill_between(x, lows, highs, color=color, alpha=0.15, linewidth=0)


def legend(axes: Axes, columns: int = 4) -> None:
    """Explain the colors above the axes, where nothing is drawn."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=columns, fontsize=7.5, frameon=False)


def shared_legend(drawn: Figure) -> None:
    """Explain the colors that several axes share, beside all of them."""
    found = drawn.axes[0].get_legend_handles_labels()
    drawn.legend(*found, loc="outside right upper", fontsize=7.5, frameon=False)


def to_svg(drawn: Figure, caption: str) -> str:
    """The figure's SVG with `caption` at its foot."""
    import matplotlib

    wide = int(20 * drawn.get_figwidth())  # letters of this size in an inch
    lines = [line for part in caption.splitlines() for line in textwrap.wrap(part, wide)]
    drawn.supxlabel("\n".join(lines), fontsize=6.5, color="#64748b", x=0.01, ha="left")
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        drawn.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
