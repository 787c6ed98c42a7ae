"""The models of one rank by what they are for: a policy that learns, and what some algorithms put beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8rl.models.adapters import AdapterConfig
from fp8rl.models.roles import Role
from fp8rl.numerics.config import NumericsConfig
from fp8rl.trainer.base import Base
from fp8rl.trainer.checkpoint import checkpoint
from fp8rl.trainer.config import TrainerConfig
from fp8rl.trainer.critic import Critic
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.inventory import inventory, of_model
from fp8rl.trainer.room import put_aside, take_back
from fp8rl.trainer.scorer import Scorer
from fp8rl.trainer.step.result import MovedAside
from fp8rl.trainer.trainer import Trainer


class Roles:
    """What one rank holds; all of it from one model directory, in one layout and one numerics.

    Attributes:
        models: by role. The policy is always there.
    """

    def __init__(
        self,
        model_path: Path,
        config: TrainerConfig,
        numerics: NumericsConfig,
        layout: Layout,
        *,
        reference: bool = False,
        critic: TrainerConfig | None = None,
        adapter: AdapterConfig | None = None,
        shared_base: bool = False,
        **options: Any,
    ) -> None:
        """reference: whether a model is to stay as the directory has it: of a policy with adapters its own weights, of
        any other a copy. critic: its optimizer's settings, if there is to be one. adapter: of all that is trained.
        shared_base: the policy's frozen weights come from a base; see `Scorer`. options: the keywords of `Trainer`.

        Raises:
            UserError: as `Trainer` does.
        """
        self.policy = Trainer(model_path, config, numerics, layout, adapter=adapter, shared_base=shared_base, **options)
        self.models: dict[Role, Scorer | Base] = {"policy": self.policy}
        if reference and adapter is not None:
            self.models["reference"] = Base(self.policy)
        elif reference:
            length = options["max_sequence_length"]
            self.models["reference"] = Scorer(model_path, config, numerics, layout, max_sequence_length=length)
        if critic is not None:
            self.models["critic"] = Critic(model_path, critic, numerics, layout, adapter=adapter, **options)

    def trained(self, role: Role) -> Trainer:
        """The model of a role that has an optimizer."""
        model = self.models[role]
        assert isinstance(model, Trainer), role
        return model

    def put_aside(self) -> MovedAside:
        """Make room on the device: see :func:`trainer.room.put_aside`."""
        held = sum(
            holding.bytes
            for model in self._held()
            for holding in (inventory(model) if isinstance(model, Trainer) else of_model(model))
        )
        moved = sum(put_aside(model) for model in self.models.values() if isinstance(model, Trainer))
        return MovedAside(moved, held - moved)

    def take_back(self) -> None:
        """Undo `put_aside`."""
        for model in self.models.values():
            if isinstance(model, Trainer):
                take_back(model)

    def stage(self, path: Path, extra: dict[str, Any], texts: Mapping[str, str]) -> checkpoint.Staged:
        """Copy what a checkpoint holds of all that is trained; see :func:`trainer.checkpoint.checkpoint.stage`."""
        return checkpoint.stage(path, self._parts(), self.policy.weight_version, extra, texts)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint and return its `extra`. A reference stays what it was."""
        self.policy.weight_version, extra = checkpoint.load(path, self._parts())
        for model in self._held():
            model.weights_changed()
        return extra

    def set_numerics(self, numerics: NumericsConfig) -> None:
        """Have all of them compute in other numerics; see :meth:`Scorer.set_numerics`."""
        for model in self._held():
            model.set_numerics(numerics)

    def _held(self) -> list[Scorer]:
        """The models that have weights of their own."""
        return [model for model in self.models.values() if isinstance(model, Scorer)]

    def _parts(self) -> checkpoint.Parts:
        trained = {role: model.trained for role, model in self.models.items() if isinstance(model, Trainer)}
        return {"" if role == "policy" else role: part for role, part in trained.items()}
