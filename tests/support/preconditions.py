"""What the tests of the preconditions share: data files, variants of a spec, and the refusal that one gets."""

import json

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import parse_experiment
from fp8rl.rl.experiment.budget.job import gpu_named
from fp8rl.rl.experiment.preconditions import check
from fp8rl.rl.experiment.preconditions.rules import Target


def write_lines(path, problems):
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in problems))


def merged(values: dict, **sections: dict) -> dict:
    return {**values, **{name: {**values.get(name, {}), **keys} for name, keys in sections.items()}}


def refusal(values: dict, **sections: dict) -> str:
    with pytest.raises(UserError) as error:
        check(parse_experiment(merged(values, **sections)))
    return str(error.value)


def on(gpu: str | None) -> Target:
    """Machines with GPUs of this name; none: with CPUs alone."""
    return Target(bool(gpu), bool(gpu), capability=gpu_named(gpu).capability if gpu else None)


def edit_config(model, **changes) -> None:
    path = model / "config.json"
    config = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}
    path.write_text(json.dumps(config))
