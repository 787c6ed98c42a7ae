"""What stands in a rank's memory between two ops of a step, class by class of the precision map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fp8rl.diagnose.audit.formats import stored
from fp8rl.diagnose.audit.sighting import Sighting
from fp8rl.diagnose.audit.sites import Part, Sites
from fp8rl.numerics.holdings import format_of
from fp8rl.numerics.precision_map import Planned

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer  # megatron is for the ranks, not for the driver

_WEIGHTS: dict[Part, str] = {
    "embedding": "embedding.weight",
    "head": "head.weight",
    "router": "router.weight",
    "norm": "gain.weight",
    "product": "product.shadow",
    "experts": "product.shadow",
}


def held_in_pass(trainer: Trainer, sites: Sites, plan: Mapping[str, Planned]) -> Iterator[Sighting]:
    """What is held after a backward: weights, what products have made of them, and gradients."""
    from fp8rl.trainer.inventory import inventory

    for each in inventory(trainer):
        part = sites.parameters.get(each.name)
        if part is not None:  # not padding
            keys = {
                "parameters": _WEIGHTS[part],
                "operands": "product.cached",
                "gradients": "gradient.buffer",
            }
            if key := keys.get(each.kind):
                yield Sighting(key, each.name, each.format, plan[key].formats, bytes=each.bytes)


def held_by_optimizer(trainer: Trainer, sites: Sites, plan: Mapping[str, Planned]) -> Iterator[Sighting]:
    """What the optimizer holds after an update, judged by value: before it, masters are what a checkpoint holds.

    A master whose moments are zero was never updated, and is taken for what its dtype says.
    """
    from fp8rl.trainer.inventory import optimizer_state

    held = [(name.partition(":")[0], name, kind, tensor) for name, kind, tensor in optimizer_state(trainer)]
    updated = {parameter for parameter, _, kind, tensor in held if kind == "moments" and tensor.any()}
    for parameter, name, kind, tensor in held:
        if kind != "rest":
            gain = sites.parameters[parameter] == "norm"
            key = "moment" if kind == "moments" else "gain.master" if gain else "master"
            found = stored(tensor) if parameter in updated else format_of(tensor.dtype)
            yield Sighting(key, name, found, plan[key].formats, bytes=tensor.nbytes)
