"""Watches every op in one training step of the live trainer. Runs on the trainer's ranks.

A dispatch mode sees each call of torch with its tensors, also in the backward. The layers' program says which op of the
model makes a call; in native mode, and outside the layers, hooks of modules say it. A call of the backward belongs to
the op that made its autograd node: nodes are numbered in the order of the forward.
Tensors inside a fused kernel are not seen, and are missing in what is returned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8rl.diagnose.audit.observations import (
    Grids,
    ModuleRole,
    Observation,
    Part,
    Sites,
    held_by_optimizer,
    held_in_pass,
    stored,
)
from fp8rl.models.program import LOGITS, OpSite
from fp8rl.numerics.backend import dispatch
from fp8rl.numerics.backend.compiler import uncompiled
from fp8rl.numerics.backend.implementation import Implementation, using
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.memory import format_of, tensors_in
from fp8rl.numerics.precision_map import Planned, precision_map, unquantized
from fp8rl.numerics.spec import Role
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.objective import Objective

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer  # megatron is for the ranks, not for the driver

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm"}
SUMS = {"mean", "sum", "norm", "linalg_vector_norm", "logsumexp", "_softmax", "_log_softmax", "_fused_rms_norm"}
SOFTMAX = {"exp", "amax", "max"}
"""The ops of a softmax that is composed of simple ops."""
SPREAD = {"_AddBiasBackward", "AddBackward0", "ExpandBackward0"}
"""Nodes that spread one value over rows or heads, such as a bias; the value's gradient is a sum over them."""
BACKWARD = {"_softmax_backward_data", "_log_softmax_backward_data", "_fused_rms_norm_backward"}
ACCUMULATE = "torch::autograd::AccumulateGrad"
FORMATS = {"fp32", "bf16", "fp16", "e4m3", "e5m2"}
CAST = "_to_copy"
COPIES = {CAST, "clone", "index_copy"}
"""Ops that copy an operand: an adapter in another dtype or order, or with its rows in the product's places."""
CLIPPING, UPDATE = "clipping", "update"
WIRES = {"start_grad_sync": "gradient.wire", "start_param_sync": "wire.weights"}
"""Methods of Megatron's groups of buffers, with the class of what they send."""
_SUMMED: dict[Part, str] = {
    "router": "router.softmax",
    "norm": "norm.reduction",
    "product": "norm.reduction",
    "experts": "router.gradient",
}
_LEAVES: dict[Part, str] = {
    "embedding": "embedding.output",
    "head": "head.logits",
    "router": "router.probabilities",
    "attention": "attention.output",
    "product": "product.output",
    "experts": "experts.output",
    "gate": "product.output",
    "norm": "norm.output",
}


def watch_step(
    trainer: Trainer, batch: TokenBatch, objective: Objective, numerics: NumericsConfig, config: TrainerSection
) -> list[Observation]:
    """Train on `batch`, uncompiled, and report all tensors of the precision map. All ranks take part.

    Shared ops run on their torch definitions, whose insides can be seen. Where this device's kernels round otherwise
    than the definition (attention weights), nothing is reported, because the definition's format is not the run's.

    numerics, config: the planned ones, which the trainer may no longer run.
    """
    from fp8rl.trainer.modules.native import megatron_families

    own = {key: it for site in trainer.definition.forward.sites() for key, it in site.op.form.formats.items()}
    if numerics.mode == "native":
        own |= {key: it for family in megatron_families(trainer.definition) for key, it in family.formats.items()}
    implementation: Implementation = "torch" if dispatch.installed() is None else "triton"
    with uncompiled(), using("torch"):
        trainer.score(batch)  # what is done once and for all, such as probes of the machine, is no part of a step
        trainer.weights_changed()
        sites = Sites(trainer, numerics)
        plan = precision_map(
            numerics,
            implementation=implementation,
            gradient_wire=config.gradient_wire,
            weight_gather=config.weight_gather,
            own=own,
        )
        watcher = _Watcher(trainer, sites, plan, Grids(numerics))
        with watcher.hooked(), watcher:
            trainer.forward_backward(batch, objective)
        held = list(held_in_pass(trainer, sites, plan))
        with watcher.hooked(), watcher:
            trainer.update()
    return [*watcher.sightings(), *held, *held_by_optimizer(trainer, sites, plan)]


class _Watcher(TorchDispatchMode):
    def __init__(self, trainer: Trainer, sites: Sites, plan: Mapping[str, Planned], grids: Grids) -> None:
        super().__init__()
        from fp8rl.trainer.inventory import buffer_kinds
        from fp8rl.trainer.modules.weights import named_weights

        self._trainer, self._sites = trainer, sites
        self._plan, self._grids = plan, grids
        self._seen: Counter[tuple[str, str, str, tuple[str, ...]]] = Counter()
        self._bytes: Counter[tuple[str, str, str, tuple[str, ...]]] = Counter()
        self._modules: list[str] = []
        self._phase = self._cast = ""
        self._places: list[tuple[int, str]] = [(0, "")]
        self._attention_products = 0
        self._buffers = buffer_kinds(trainer)
        self._parameters = {_storage(parameter) for parameter in trainer.model.parameters()}
        weights = named_weights(trainer.model)
        self._adapters = {_storage(weight): weight for name, weight in weights if name in sites.adapters}
        self._weights: set[int] | None = None

    def sightings(self) -> list[Observation]:
        return [Observation(*seen, calls, self._bytes[seen]) for seen, calls in self._seen.items()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._sent(func, args, kwargs or {})
        elif self._phase in WIRES.values():
            if func.__name__.partition(".")[0] == CAST and out.is_floating_point() and out.dtype.itemsize < 4:
                self._cast = format_of(out.dtype)
        elif self._phase != UPDATE:
            if torch.is_grad_enabled() and self._node() is not None:  # a backward that takes gradients of its own
                self._places.append((torch.autograd._get_sequence_nr() - 1, self._place()))
            if func.__name__.partition(".")[0] in COPIES and self._from_adapter(args):
                self._adapters[_storage(out)] = out  # kept, so that nothing else comes to lie there
            self._computed(func.__name__.partition(".")[0], args, out)
        return out

    # Where

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow the forward from op to op or module to module, and note when the optimizer is at work."""
        from fp8rl.trainer.modules.program import OpsModule

        with ExitStack() as undo:
            of_ops = [module for module in self._trainer.model.modules() if isinstance(module, OpsModule)]
            inside = {module for each in of_ops for module in each.modules() if module is not each}
            for each in of_ops:
                undo.enter_context(each.around_ops(self._op))
            for path, module in self._trainer.model.named_modules():
                if module not in inside:
                    undo.callback(module.register_forward_pre_hook(self._entering(path)).remove)
                    undo.callback(module.register_forward_hook(self._leaving(path), always_call=True).remove)
            optimizer = self._trainer.optimizer
            undo.enter_context(self._within(optimizer, "grad_norm", CLIPPING))
            undo.enter_context(self._within(optimizer, "step", UPDATE))
            for group in (*optimizer.model.bucket_groups, *optimizer.model.expert_parallel_bucket_groups):
                for method, key in WIRES.items():
                    undo.enter_context(self._within(group, method, key))
            yield

    @contextmanager
    def _within(self, owner: Any, method: str, phase: str) -> Iterator[None]:
        """Set the phase while a method runs."""
        inner = getattr(owner, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            outer, self._phase, self._cast = self._phase, phase, ""
            try:
                return inner(*args, **kwargs)
            finally:
                self._phase = outer

        setattr(owner, method, noted)  # hides the class's method until it is deleted
        try:
            yield
        finally:
            delattr(owner, method)

    def _op(self, site: OpSite, compute: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Follow one op of a layer's program."""
        path = self._sites.path_of(site)
        self._entering(path)()
        made: Sequence[Any] = ()
        try:
            made = compute()
        finally:  # a router's logits are noted as its product is
            known = LOGITS not in site.op.writes and isinstance(next(iter(made), None), Tensor)
            self._leaving(path)(None, None, made if known else None)
        return made

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._modules.append(path)
            self._places.append((torch.autograd._get_sequence_nr(), path))
            if (site := self._sites.exactly(path)) and site.part == "attention":
                self._attention_products = 0

        return enter

    def _leaving(self, path: str) -> Callable[..., None]:
        layers = {f"decoder.layers.{index}" for index in range(len(self._trainer.model.decoder.layers))}

        def leave(_: Any, __: Any, out: Any) -> None:
            self._modules.pop()
            self._places.append((torch.autograd._get_sequence_nr(), self._place()))
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            if not tensors:
                return
            if path in layers:
                self._note("residual", path, self._grids.format(tensors[0], "activation"))
                if tensors[0].requires_grad:
                    tensors[0].register_hook(
                        lambda grad: self._note("gradient.stream", path, self._grids.format(grad, "gradient"))
                    )
            if site := self._sites.exactly(path):  # most probabilities are zero, and those of one expert 1
                out, router = tensors[0], site.part == "router"
                found = format_of(out.dtype) if router else self._grids.format(out, "activation")
                self._note(_LEAVES[site.part], path, found)

        return leave

    def _place(self) -> str:
        """Return the path of the module whose forward or backward runs."""
        if (node := self._node()) is None:
            return self._modules[-1] if self._modules else ""
        return self._places[bisect_right(self._places, node._sequence_nr(), key=lambda place: place[0]) - 1][1]

    def _node(self) -> Any:
        """Return the node whose backward runs; None in a forward, even one that a backward repeats."""
        return None if self._modules else torch._C._current_autograd_node()

    # What

    def _computed(self, op: str, args: Any, out: Any) -> None:
        if op not in PRODUCTS | SUMS | SOFTMAX | BACKWARD | {"add_"}:
            return
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if not tensors or not tensors[0].is_floating_point():
            return
        node = self._node()
        if op == "add_":
            if node is not None and len(tensors) == 2 and self._buffers.get(_storage(tensors[0])) == "gradients":
                self._note("gradient.weight", "the model's parameters", format_of(tensors[1].dtype))
            return
        if node is not None and node.name() == ACCUMULATE:
            return
        path = self._place()
        site = self._sites.at(path)
        if op in PRODUCTS:
            if site is not None:
                self._multiplied(site, node is not None, tensors[-2], tensors[-1], out)
        else:
            self._reduced(site, path, op, node is not None, format_of(tensors[0].dtype))

    def _multiplied(self, site: ModuleRole, backward: bool, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Note one matrix product. Quantized operands are grouped along the axis that is summed over."""
        if not left.numel() or not right.numel():  # an expert without tokens
            return
        if (key := self._adapts(left, right)) is not None:
            for operand in (left, right):
                wide = stored(operand)
                narrowest = self._grids.format(operand.bfloat16(), "activation") if wide == "bf16" else wide
                self._note(key, site.path, narrowest)
            return
        if site.part == "attention":
            if not backward and out.dim() > 2:  # in turns: queries and keys, weights and values; others have parameters
                first = self._attention_products % 2 == 0
                self._attention_products += 1
                key = "scores.output" if first else "softmax.output"
                self._note(key, site.path, format_of(out.dtype if first else left.dtype))
            return
        if backward and self._weights is None:  # there are no more of them once the backward begins
            operands = [tensor for _, operand in self._trainer.cache.operands() for tensor in tensors_in(operand)]
            self._weights = {_storage(tensor) for tensor in operands} | self._parameters
        with_weight = not backward or _storage(right) in (self._weights or ())
        roles: tuple[Role, Role] = "gradient" if backward else "activation", "weight" if with_weight else "activation"
        for role, operand in zip(roles, (left, right), strict=True):
            # A parameter is what its dtype says, whatever its values: they may come from a checkpoint in FP8.
            own = role == "weight" and _storage(operand) in self._parameters
            found = format_of(operand.dtype) if own else self._grids.format(operand, role)
            if site.part in ("product", "experts"):
                self._note(f"{site.part}.{role}", site.path, found, site)
            elif site.part in ("head", "router"):
                self._note(f"{site.part}.operands", site.path, found)
        if site.part == "router" and not backward:
            self._note("router.logits", site.path, format_of(out.dtype))

    def _adapts(self, left: Tensor, right: Tensor) -> str | None:
        """Return the class of an adapter's product; None for all other products."""
        if left.dtype is torch.float64:
            return "adapter.merged"
        seen: Iterable[Any] = (left, right)
        if (node := self._node()) is not None:  # what it was made of: gradients are products of others
            seen = (*getattr(node, "saved_tensors", ()), *getattr(node, "operands", ()))
        return "adapter.operands" if self._from_adapter(seen) else None

    def _from_adapter(self, values: Iterable[Any]) -> bool:
        return any(isinstance(value, Tensor) and _storage(value) in self._adapters for value in values)

    def _reduced(self, site: ModuleRole | None, path: str, op: str, backward: bool, found: str) -> None:
        """Note the operand of a reduction, except the maxima that quantizers take: the map does not list them."""
        if self._phase == CLIPPING:
            self._note("clipping.norm", "gradients", found)
        elif site is None:
            if not path and op not in SOFTMAX:
                self._note("loss.reduction", "loss", found)
        elif site.part == "attention":
            # What else is summed in the backward are gradients of heads that share their keys.
            if not backward or op in BACKWARD:
                self._note("softmax.reduction", site.path, found)
        elif op not in SOFTMAX and not (backward and self._node().name() in SPREAD):
            if (key := _SUMMED.get(site.part)) is not None:
                self._note(key, site.path, found)

    def _sent(self, func: Any, args: Any, kwargs: Any) -> None:
        from fp8rl.trainer.inventory import transfer

        call = transfer(func, args, kwargs, self._buffers)
        name = f"{call.collective} of {call.ranks} ranks"
        if self._phase in WIRES.values():
            # What is not sent as it stands was cast before, and travels as bytes, with its scales.
            if call.kind != "rest" or not call.collective.startswith("allreduce"):  # of largest values, for scales
                self._note(self._phase, name, self._cast or call.format, size=call.bytes)
        elif call.format in FORMATS:  # others are counts and words
            self._note("clipping.norm" if self._phase == CLIPPING else "wire.layer", name, call.format, size=call.bytes)

    def _note(self, key: str, name: str, found: str | None, site: ModuleRole | None = None, size: int = 0) -> None:
        plan = self._plan[key]
        if found is None or plan.hidden:
            return
        formats = plan.formats
        if site is not None:
            plans = [plan if quantized else unquantized(plan) for quantized in sorted(site.quantized)]
            formats = tuple(dict.fromkeys(form for each in plans for form in each.formats))
        seen = (key, name, found, formats)
        self._seen[seen] += 1
        self._bytes[seen] += size


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
