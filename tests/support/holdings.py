"""Sums of what a rank or an engine holds."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

from fp8rl.numerics.core.memory import Holding
from fp8rl.trainer.inventory import Kind, inventory


def total_bytes(held: Iterable[Holding]) -> Counter[str]:
    """Bytes by kind."""
    sums = Counter[str]()
    for each in held:
        sums[each.kind] += each.bytes
    return sums


def bytes_held(trainer: Any) -> dict[str, int]:
    """Bytes of what a trainer's rank holds by kind; 0 for what there is none of."""
    sums = total_bytes(inventory(trainer.optimizer, trainer.cache))
    return {kind: sums[kind] for kind in get_args(Kind)}
