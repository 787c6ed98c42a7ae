"""The terminal: shows texts of users, models and servers, and executes no control sequence in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


class Terminal(Console):
    """Shows texts literally: no markup, no emoji, and no control characters."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for piece in super().render(renderable, options):
            text = "".join(letter for letter in piece.text if letter.isprintable() or letter in "\n\t")
            yield piece if piece.control else Segment(text, piece.style)
