"""The parameters of one rank of a large model, built on the meta device in a world of which this rank alone is real."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8rl.models import read_model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.rl.experiment import Experiment
from fp8rl.trainer.config import TrainerSection


@dataclass(frozen=True)
class Held:
    """One parameter of a rank.

    tensors: of the checkpoint, in it. shape: of this rank's part. split: axis that tensor-parallel ranks share.
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    split: int | None


def parameters_of(directory: Path, experiment: Experiment, rank: int) -> list[Held]:
    """What `trainer.megatron.model.build_model` gives a rank of an experiment; in a process of its own."""
    from fp8rl.numerics.weight_cache import WeightCache
    from fp8rl.trainer.modules.weights import named_weights
    from fp8rl.trainer.weights.hf_weights import HFWeights

    numerics = experiment.numerics_config()
    definition, layout = read_model(directory), layout_of(experiment.trainer, rank)
    model = built(directory, experiment.trainer, numerics, experiment.rollout.context_length)
    weights = HFWeights(directory, definition, numerics.spec.weight, WeightCache(), layout)
    rows, found = weights.rows(model), []
    for name, each in named_weights(model):
        split = rows[name][0].expert is None and getattr(each, "tensor_model_parallel", False)
        tensors = tuple(row.name for row in rows[name])
        found.append(Held(tensors, tuple(each.shape), each.partition_dim if split else None))
    return found


def layout_of(config: TrainerSection, rank: int) -> Any:
    """The layout of a rank whose world answers nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fp8rl.trainer import device
    from fp8rl.trainer.distributed import parallel

    device.collectives = lambda here: "fake"
    return parallel.initialize(config, rank, FakeStore())


def built(path: Path, config: TrainerSection, numerics: NumericsConfig, length: int = 512) -> Any:
    """The model of a directory on the meta device, in a process of its own."""
    from fp8rl.numerics.weight_cache import WeightCache
    from fp8rl.trainer.megatron.lowering import Lowering
    from fp8rl.trainer.megatron.model import build_model
    from fp8rl.trainer.modules.precision import Precision

    torch.cuda.current_device = lambda: torch.device("meta")
    definition = read_model(path)
    precision = Precision(numerics, WeightCache(), definition.sizes.layers)
    return build_model(definition, config, precision, Lowering(), length)


def wrapped(model: Any, whole: bool = True) -> Any:
    """A model as Megatron wraps it for its gradients, or a layer's experts alone."""
    from fp8rl.trainer.distributed.optimizer import wrap
    from fp8rl.trainer.megatron.lowering import Lowering

    experts = [each for name, each in model.named_parameters() if not whole or ".experts." in name]
    return wrap(model, Lowering(), experts)
