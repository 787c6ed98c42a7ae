"""Gates on metrics that the run does not have: of a reward, a set or a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8rl.models import ModelSizes
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.record.metrics import REWARD_PARTS
from fp8rl.rollout.tasks.rewards.builtin import BUILT_IN

_MAY_NAME_PARTS = ("http",)
"""Rewards of ours that may return several numbers."""
_OF_LAYER = "mismatch/router_agreement_layer_"


def check_gate_names(experiment: Experiment) -> None:
    """Check that every gate's metric is of a reward and a set that the run has.

    Raises:
        UserError: naming the first gate that could never fire.
    """
    for index, gate in enumerate(experiment.gates):
        if (known := _known(gate.metric, experiment)) is not None:
            raise user_error(
                f"gates.{index}.metric",
                found=gate.metric,
                expected=f"one of {', '.join(known)}" if known else "another metric: this run has none of that kind",
                remedy="Correct the name, or remove the gate.",
            )


def check_gate_layers(experiment: Experiment, sizes: ModelSizes) -> None:
    """Check that every gate on a layer's experts is on one that the model has.

    Raises:
        UserError: naming the first gate that could never fire.
    """
    for index, gate in enumerate(experiment.gates):
        layer = gate.metric.removeprefix(_OF_LAYER)
        if layer != gate.metric and int(layer) >= sizes.moe_layers:
            raise user_error(
                f"gates.{index}.metric",
                found=gate.metric,
                expected=f"a layer below {sizes.moe_layers}, the model's layers with experts",
                remedy="Correct the number, or remove the gate.",
            )


def _known(name: str, experiment: Experiment) -> Sequence[str] | None:
    """Return the metrics that a run has in place of this one; None: it may have this one."""
    if name.startswith(REWARD_PARTS):
        functions = experiment.rewards.functions
        whole = {each.function for each in functions} <= BUILT_IN.keys() - set(_MAY_NAME_PARTS)
        known = [REWARD_PARTS + each.label for each in functions] if len(functions) > 1 or not whole else []
        return None if "/".join(name.split("/")[:3]) in known else known
    if name.startswith("eval/") and name != "eval/at_step":
        known = [*_evaluated(experiment)]
        return None if name in known else known
    return None


def _evaluated(experiment: Experiment) -> Iterator[str]:
    if experiment.data.eval is not None:
        yield from ("eval/accuracy", "eval/problems")
    for own in experiment.eval.sets:
        names = ["accuracy", "problems", "finished_fraction", "response_tokens_mean"]
        names += [f"avg@{own.samples}"] * (own.samples > 1) + [f"pass@{k}" for k in own.pass_at]
        yield from (f"eval/{own.name}/{name}" for name in names)
