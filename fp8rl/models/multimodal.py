"""Multimodal checkpoints, of a model of text and a tower for pictures: the text is trained, the tower is kept.

Such a checkpoint has another config.json, other names, and may stack experts. Files are read and written in its form;
everything else sees the model of text alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Multimodal:
    """How a published checkpoint holds a model of text beside a tower for pictures."""

    name: str
    """In `architectures` of its config.json."""
    model_type: str
    """In its config.json beside the name."""
    text: str = "text_config"
    """The key of config.json under which the text's stands."""
    shared: tuple[str, ...] = ("tie_word_embeddings", "quantization_config")
    """Keys beside it that mean the text, too."""
    pictures: tuple[str, ...] = ("image_token_id", "video_token_id")
    """Keys beside it of tokens that stand for parts of a picture."""
    prefix: str = "model.language_model."
    """What names of the text begin with, where those of the table begin with `model.`"""
    towers: tuple[str, ...] = ("model.visual.",)
    """What names of the tower begin with."""
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ends of names of tensors [experts, N, K], and the last parts of names of each expert's matrices in them."""

    def names(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Piece]:
        """Return where each tensor of the table stands among those stored, which are given with their shapes; what is
        only kept stands under its own name."""
        found: dict[str, Piece] = {}
        for name, shape in stored.items():
            text = name.replace(self.prefix, "model.", 1) if name.startswith(self.prefix) else name
            parts = next((parts for end, parts in self.stacked.items() if text.endswith(end)), ())
            if text == name or not parts or len(shape) != 3:
                found[text] = Piece(name)
                continue
            before, (experts, rows, _) = text.rpartition(".")[0], shape
            for expert in range(experts):
                for place, part in enumerate(parts):
                    first, after = (rows * n // len(parts) for n in (place, place + 1))
                    found[f"{before}.{expert}.{part}.weight"] = Piece(name, shape, expert, first, after)
        return found


@dataclass(frozen=True)
class Piece:
    """Where a tensor stands in a checkpoint's files."""

    name: str
    """Of the tensor that it is, or is a part of."""
    of: tuple[int, ...] = ()
    """That tensor's shape [experts, N, K]; (): it is all of it."""
    expert: int = 0
    first: int = 0
    after: int = 0
    """Its rows are `first` to `after` - 1 of this expert's."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.after - self.first, self.of[2]) if self.of else ()

    @property
    def start(self) -> int:
        """Return the number of elements before it in what it is a part of."""
        return (self.expert * self.of[1] + self.first) * self.of[2] if self.of else 0
