"""What an audit sees: tensors of one class at one place, in one format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sighting:
    """Tensors of one class at one place, in one format.

    Attributes:
        key: of their class in the precision map. name: of the module, the parameter, the tensor or the collective.
        found: their format. planned: those that will do there. calls: how often they were seen.
        bytes: of what is held or sent; 0 for what passes.
    """

    key: str
    name: str
    found: str
    planned: tuple[str, ...]
    calls: int = 1
    bytes: int = 0
