"""What the live trainer does in a forward pass, seen from within. Runs on the trainer's ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8rl.trainer.step.batch import TokenBatch

if TYPE_CHECKING:
    from torch import nn

    from fp8rl.trainer.trainer import Trainer  # megatron is for the ranks, not for the driver


@dataclass(frozen=True)
class Observed:
    """One rank in one forward pass.

    quantized: HF names of the weights whose products ran in FP8, in order. routers: (dtype of the logits, dtype of the
    probabilities) of every router call, each pair once.
    """

    quantized: list[str]
    routers: list[tuple[str, str]]


def observe(trainer: Trainer, batch: TokenBatch) -> Observed:
    """Score the batch and look on."""
    trainer.weights_changed()  # so that the cache holds what this pass asks for, and no more
    with _watched_routers(trainer.model) as routers:
        trainer.score(batch)
    rows = trainer.weights.rows(trainer.model)
    quantized = [row.name for name in trainer.quantized_parameters() for row in rows[name]]
    return Observed(sorted(quantized), sorted(routers))


@contextmanager
def _watched_routers(model: nn.Module) -> Iterator[set[tuple[str, str]]]:
    from megatron.core.transformer.moe.router import TopKRouter

    seen: set[tuple[str, str]] = set()
    routers: list[Any] = [module for module in model.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        router.routing = _watched(router.routing, seen)  # hides the class's method until it is deleted
    try:
        yield seen
    finally:
        for router in routers:
            del router.routing


def _watched(routing: Callable[..., Any], seen: set[tuple[str, str]]) -> Callable[..., Any]:
    def watched(logits: Any, *args: Any, **kwargs: Any) -> Any:
        result = routing(logits, *args, **kwargs)
        seen.add((_name(logits.dtype), _name(result[0].dtype)))
        return result

    return watched


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
