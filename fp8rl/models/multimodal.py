"""Describes multimodal checkpoints: a text model, which is trained, and an image encoder (tower), kept unchanged.

Such a checkpoint has another config.json and other names of tensors, and may stack experts. Files are read and written
in its form; all other code sees only the text model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Multimodal:
    """How a published checkpoint holds a text model together with an image encoder."""

    name: str
    """The checkpoint's name in `architectures` of config.json."""
    model_type: str
    """The value of `model_type` in config.json."""
    text: str = "text_config"
    """The key of config.json that has the configuration of the text model."""
    shared: tuple[str, ...] = ("tie_word_embeddings", "quantization_config")
    """Keys at the top of config.json that hold for the text model, too."""
    pictures: tuple[str, ...] = ("image_token_id", "video_token_id")
    """Keys at the top of config.json that give the tokens for parts of a picture."""
    prefix: str = "model.language_model."
    """The beginning of the text model's names, in place of `model.` in the table of tensors."""
    towers: tuple[str, ...] = ("model.visual.",)
    """Beginnings of the tower's names."""
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key: the end of the name of a stacked tensor [experts, N, K]. Value: the last parts of the names of an expert's
    matrices in it."""

    def names(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Piece]:
        """Return the piece of the files that holds each tensor, by the names of the table. A tensor that is only kept
        has the files' name. stored: the shapes of the files' tensors, by name."""
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
    """The place of a table's tensor in a checkpoint's files: a whole tensor, or a part of a stacked tensor."""

    name: str
    """The name of the files' tensor."""
    of: tuple[int, ...] = ()
    """The shape of the stacked tensor [experts, N, K] that has this part; (): this is a whole tensor."""
    expert: int = 0
    first: int = 0
    after: int = 0
    """The part has rows `first` to `after` - 1 of the expert `expert`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a part; () for a whole tensor."""
        return (self.after - self.first, self.of[2]) if self.of else ()

    @property
    def start(self) -> int:
        """Return the number of elements of the stacked tensor that precede the part; 0 for a whole tensor."""
        return (self.expert * self.of[1] + self.first) * self.of[2] if self.of else 0
