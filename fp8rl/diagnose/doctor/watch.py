"""Watches one training step of the live trainer and one forward pass of an engine, and lists what both hold.

The ops' dispatcher shows each shared op with its tensors (`models.formats`). In exact mode these are all ops of the
model. Tensors inside a library's op (in native mode) or inside a Triton kernel are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fp8rl.models import Model
from fp8rl.models.formats import Recorder, Sighting, address, own_formats, part_of, stored
from fp8rl.models.tensors import TensorRow, base_name
from fp8rl.numerics.backend import dispatch
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.memory import Holding, format_of
from fp8rl.numerics.precision_map import precision_map
from fp8rl.rollout.engine.plugin.state import DERIVED, KV_CACHE, SCALES, STATES
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.step.batch import Objective, TokenBatch

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer  # megatron is for the ranks, not for the driver


def watch_step(
    trainer: Trainer, batch: TokenBatch, objective: Objective, numerics: NumericsConfig, config: TrainerSection
) -> list[Sighting]:
    """Train on `batch`, and report all tensors of the precision map. All ranks take part.

    numerics, config: as planned; the trainer may run others by now.
    """
    from fp8rl.trainer.inventory import inventory, transfers
    from fp8rl.trainer.modules.native import megatron_families
    from fp8rl.trainer.modules.weights import named_weights
    from fp8rl.trainer.op_trace import placed

    definition, own = trainer.definition, own_formats(trainer.definition)
    if numerics.mode == "native":
        own |= {key: it for family in megatron_families(definition) for key, it in family.formats.items()}
    wires = {"gradient_wire": config.gradient_wire, "weight_gather": config.weight_gather}
    plan = precision_map(numerics, **wires, own=own)
    rows = {name: held[0] for name, held in trainer.weights.rows(trainer.model).items()}
    adapters = {address(weight) for name, weight in named_weights(trainer.model) if rows[name].adapts is not None}
    recorder = Recorder(definition, numerics, plan, "trainer", adapters)
    trainer.weights_changed()  # so that the operands of products are made within the step
    with placed(trainer), _outside_ops(trainer, recorder), dispatch.watched(recorder), transfers() as sent:
        trainer.forward_backward(batch, objective)
    floats = {"fp32", "bf16", "fp16", "e4m3", "e5m2"}
    for wire in sent:
        # Others are counts, norms, and flat buffers, of which the wires have told already.
        if wire.format in floats and len(wire.shape) > 1:
            recorder.note("wire.layer", f"{wire.collective} of {wire.ranks} ranks", wire.format, size=wire.bytes)
    for optimizer in trainer.optimizer.inner.chained_optimizers:
        for gradient in optimizer.get_main_grads_for_grad_norm():
            recorder.note("clipping.norm", "gradients", format_of(gradient.dtype))
    keys = {name: class_of(definition, row) for name, row in rows.items()}
    held: list[Sighting] = []  # after the backward pass: weights, their operands, and gradients
    for each in inventory(trainer.optimizer, trainer.cache):
        of = {"parameters": keys.get(each.name), "operands": "product.cached", "gradients": "gradient.buffer"}
        if each.name in keys and (key := of.get(each.kind)):  # not padding
            held.append(Sighting(key, each.name, each.format, plan[key], bytes=each.bytes))
    with dispatch.watched(recorder):
        trainer.update()
    return [*recorder.sightings(), *held, *_held_by_optimizer(trainer, keys, plan)]


@contextmanager
def _outside_ops(trainer: Trainer, recorder: Recorder) -> Iterator[None]:
    """Note tensors of no op: the residual stream and its gradient, weights' gradients."""

    def stream(layer: Any, _: Any, out: Any) -> None:
        name = f"layers.{layer.layer_number - 1}"
        x = next(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        recorder.note("residual", name, recorder.grids.format(x, "activation"))
        if x.requires_grad:
            x.register_hook(
                lambda grad: recorder.note("gradient.stream", name, recorder.grids.format(grad, "gradient"))
            )

    def gradient(name: str) -> Callable[[Tensor | None], None]:
        """grad: None if a product has added the gradient to the buffer itself."""
        return lambda grad: recorder.note("gradient.weight", name, None if grad is None else format_of(grad.dtype))

    with ExitStack() as undo:
        for layer in trainer.model.decoder.layers:
            undo.callback(layer.register_forward_hook(stream).remove)
        for name, weight in trainer.model.named_parameters():
            if weight.requires_grad:
                undo.callback(weight.register_hook(gradient(name)).remove)
        yield


# What stands in a rank's memory between two ops of a step.


def class_of(definition: Model, row: TensorRow) -> str:
    """Return the class that a tensor has in the forward pass."""
    if row.kind is not None or row.adapts is not None:
        return "product.shadow"
    parts = {part_of(s) for s in definition.forward.sites() if (s.layer, s.op.name) == (row.layer, row.op)}
    for part in ("embedding", "head", "router"):
        if part in parts and (row.product or part == "embedding"):
            return f"{part}.weight"
    return "product.shadow" if row.product else "gain.weight"


def _held_by_optimizer(
    trainer: Trainer, keys: Mapping[str, str], plan: Mapping[str, tuple[str, ...]]
) -> Iterator[Sighting]:
    """Yield what the optimizer holds after an update, with formats judged by value.

    Before its first update a master has the checkpoint's values, so its format is its dtype. Its moments are then zero.
    """
    from fp8rl.trainer.inventory import optimizer_state

    held = [(name.partition(":")[0], name, kind, tensor) for name, kind, tensor in optimizer_state(trainer.optimizer)]
    updated = {parameter for parameter, _, kind, tensor in held if kind == "moments" and tensor.any()}
    for parameter, name, kind, tensor in held:
        if kind != "rest":
            gain = keys[parameter] == "gain.weight"
            key = "moment" if kind == "moments" else "gain.master" if gain else "master"
            found = stored(tensor) if parameter in updated else format_of(tensor.dtype)
            yield Sighting(key, name, found, plan[key], bytes=tensor.nbytes)


def engine_holdings(held: Iterable[Holding], model: Model, numerics: NumericsConfig) -> list[Sighting]:
    """Return what a rank of an engine holds, by its `rollout.engine.plugin.state.inventory`. numerics: as planned."""
    plan = precision_map(numerics)
    kinds = {SCALES: "engine.scale", DERIVED: "engine.derived", KV_CACHE: "engine.kv_cache", STATES: "engine.state"}
    found = []
    for each in held:
        key = kinds.get(each.kind)
        if key is None:
            row = model.tensors[base_name(each.name)[0]]
            key = "engine.weight" if model.quantizes(row, numerics.rollout_spec) else "engine.leftover"
        # A router or an expert's bias may be in FP32.
        formats = (format_of(row.served),) if key == "engine.leftover" else plan[key]
        found.append(Sighting(key, each.name, each.format, formats, bytes=each.bytes, side="engine"))
    return found
