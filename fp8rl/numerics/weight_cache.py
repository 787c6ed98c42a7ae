"""Quantized weights in the form that products take, made once per weight version.

Optimizers and checkpoint loaders write weights in place without bumping torch's own version counter, so the version is
explicit: whoever changes the weights calls `advance`, and nothing of an older version is ever served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.frozen import frozen_of
from fp8rl.numerics.spec import TensorSpec


class WeightCache:
    """The operands of one model on one process."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._operands: dict[tuple[tuple[Tensor, ...], TensorSpec], Any] = {}
        self._made: dict[Tensor, Callable[[], Tensor]] = {}
        self._plain: dict[Tensor, Tensor] = {}

    def serve(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        """Serve what `make` gives at each version in place of a parameter, which gets no gradient then."""
        self._made[weight] = make

    def advance(self, version: int) -> None:
        """Announce that the weights are now those of `version`, and drop everything cached."""
        self._operands.clear()
        self._plain.clear()
        self.version = version

    def weights(self) -> list[Tensor]:
        """Return the weights that a forward has asked for at this version."""
        return [weight for weights, _ in self._operands for weight in weights]

    def operands(self) -> Iterator[tuple[tuple[Tensor, ...], Any]]:
        """Yield the operands of this version: the weights of a product, and their operand."""
        yield from ((weights, operand) for (weights, _), operand in self._operands.items())
        yield from (((weight,), served) for weight, served in self._plain.items())

    def served(self, weight: Tensor) -> Tensor:
        """Return the weight that a module serves in place of its parameter, made anew.

        Quantized products take it, and engines are sent it. It is the parameter as it stands, or the dequantized codes
        of a frozen one, or what `serve` puts in its place.
        """
        if (make := self._made.get(weight)) is not None:
            return make()
        frozen = frozen_of(weight)
        return weight.detach() if frozen is None else frozen.dequantized().to(weight.dtype)

    def plain(self, weight: Tensor) -> Tensor:
        """Return the weight of an unquantized product: the parameter itself, for its gradient, or what is served in its
        place, made once per version."""
        if weight not in self._made and frozen_of(weight) is None:
            return weight
        if weight not in self._plain:
            self._plain[weight] = self.served(weight)
        return self._plain[weight]

    def operand(self, weight: Tensor, spec: TensorSpec) -> Any:
        """Return `ops.trained_operand` of what the parameter weight [N, K] serves; of a frozen one its own operand."""
        if (frozen := frozen_of(weight)) is not None:
            return frozen
        key = ((weight,), spec)
        if key not in self._operands:
            self._operands[key] = ops.trained_operand(self.served(weight), spec)
        return self._operands[key]

    def group_operand(self, weights: Sequence[Tensor] | Tensor, spec: TensorSpec) -> Any:
        """Return `ops.group_operand` of what the experts' parameters [N, K], or their stack [experts, N, K], serve."""
        given = (weights,) if isinstance(weights, Tensor) else tuple(weights)
        frozen = [each for weight in given if (each := frozen_of(weight)) is not None]
        if frozen:
            return frozen[0] if isinstance(weights, Tensor) else frozen
        if (given, spec) not in self._operands:
            served = [self.served(weight) for weight in given]
            self._operands[given, spec] = ops.group_operand(served[0] if len(given) < len(weights) else served, spec)
        return self._operands[given, spec]
