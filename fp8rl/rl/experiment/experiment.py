"""An experiment: every choice of a run in one frozen, validated object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from fp8rl.models.adapters import AdapterSection
from fp8rl.models.hub import HubPath, Revision, model_directory
from fp8rl.models.plain_yaml import write_yaml
from fp8rl.numerics.config import NumericsConfig, RolloutPrecision
from fp8rl.numerics.core.section import Section
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms import Algorithm
from fp8rl.rl.algorithms.grpo import Grpo
from fp8rl.rl.experiment.gate_sections import GateSection, GuardSection
from fp8rl.rl.experiment.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    EvalSection,
    ModelSection,
    NumericsSection,
    RunSection,
    TrackingSection,
)
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.server.client import SCORED_SHORT_OF
from fp8rl.rollout.tasks.environments import SINGLE_TURN, EnvironmentSection
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.trainer.config import TrainerSection
from fp8rl.weight_sync.config import SyncSection

S = TypeVar("S", bound=Section)

# The `teacher:` section: a second model, which gives a log-probability to each token that the policy samples.


class TeacherSection(Section):
    """The model that `algorithm.name=opd` learns from, on engines of its own. It computes in `numerics.mode`, by the
    run's quantization spec. Its weights never change."""

    path: HubPath
    """Hugging Face directory in BF16, or the name of a model of the hub. It must have the tokenizer of `model.path`."""
    revision: Revision | None = None
    """Branch, tag or commit of a model of the hub, as `model.revision`."""
    engines: int = Field(default=1, ge=1, le=4096)
    """SGLang server processes."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks of one engine, as `rollout.tp`."""
    precision: RolloutPrecision | None = None
    """`fp8` or `bf16`. Null: as `numerics.rollout`."""
    context_length: int | None = Field(default=None, ge=1)
    """Context length of an engine, which scores up to 6 tokens less. Null: `rollout.context_length` + 6."""
    max_total_tokens: int = Field(default=32768, ge=1)
    """Tokens that the KV cache of one engine holds."""

    @property
    def directory(self) -> Path:
        """The teacher's directory on this machine; see `ModelSection.directory`."""
        return model_directory(self.path, self.revision, "teacher.path")

    def engine(self, rollout: RolloutSection) -> RolloutSection:
        """Return the rollout section that the teacher's engines are started with. rollout: the policy's."""
        return rollout.model_copy(
            update={
                "engines": self.engines,
                "tp": self.tp,
                "context_length": self.context_length or rollout.context_length + SCORED_SHORT_OF,
                "max_total_tokens": self.max_total_tokens,
                "port": None,
                "sleep": False,
            }
        )

    def numerics(self, experiment: Experiment) -> NumericsConfig:
        """Return the numerics of the teacher's engines. An engine of one rank has the slices of K of the run."""
        slices = self.tp if self.tp > 1 else experiment.numerics_config().k_splits
        # The spec's scales of keys and values are chosen for the policy.
        numerics = experiment.numerics.config(slices).with_bf16_kv()
        return replace(numerics, rollout=self.precision or numerics.rollout, router_replay="off")


class Experiment(Section):
    """The spec that `fp8rl train` runs: a YAML file, resolved. `rl.experiment.load_experiment` reads one."""

    run: RunSection = RunSection()
    cluster: ClusterSection = ClusterSection()
    model: ModelSection
    numerics: NumericsSection = NumericsSection()
    data: DataSection
    environment: EnvironmentSection = EnvironmentSection()
    rewards: RewardsSection = RewardsSection()
    rollout: RolloutSection = RolloutSection()
    teacher: TeacherSection | None = None
    """The teacher's engines, with `algorithm.name=opd`."""
    trainer: TrainerSection = TrainerSection()
    adapter: AdapterSection | None = None
    algorithm: Algorithm = Grpo()
    sync: SyncSection = SyncSection()
    # Strictness would refuse the list that YAML gives; the gates inside stay strict.
    gates: tuple[GateSection, ...] = Field(default=(), strict=False)
    guard: GuardSection = GuardSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    tracking: TrackingSection = TrackingSection()

    @property
    def formula(self) -> str:
        """The loss of a token, in one line."""
        alone = self.algorithm.compares_in_group and self.rollout.group_size == 1
        note = "; rollout.group_size=1: the mean of a group of one counts as 0 and its std as 1, so A = R"
        return f"loss: {self.algorithm.loss_summary}{note * alone}"

    @property
    def needs_engines(self) -> bool:
        """True if the run samples answers, for training or evaluation."""
        return self.algorithm.samples or self.eval.problems > 0

    @property
    def has_environment(self) -> bool:
        """True if an environment answers the model."""
        return self.environment.function != SINGLE_TURN

    @property
    def redraws(self) -> int:
        """Answers of a step whose tokens the trainer draws again; 0 in native mode, where logits differ."""
        return self.guard.redraws if self.numerics.mode == "exact" else 0

    @property
    def carries_supports(self) -> bool:
        """True if the engine reports the tokens that top-p, top-k or min-p left to draw from. The trainer needs this
        report if its own logits may leave other tokens: at later weights, or in native mode."""
        later = self.rollout.staleness > 0 or self.algorithm.updates > 1
        return self.rollout.truncation.cuts and (later or self.numerics.mode == "native")

    @property
    def engine_ranks(self) -> tuple[int, ...]:
        """Tensor-parallel ranks of each engine: the policy's, then the teacher's."""
        policy = (self.rollout.tp,) * self.rollout.engines if self.needs_engines else ()
        return policy if self.teacher is None else policy + (self.teacher.tp,) * self.teacher.engines

    def numerics_config(self) -> NumericsConfig:
        """The numerics of both sides. Both add row-parallel products in the order of the side with several ranks."""
        return self.numerics.config(max(self.trainer.tp, self.rollout.tp))

    @property
    def base_spec(self) -> QuantSpec | None:
        """The quantization spec of frozen weights that both sides read from one memory. It stays the same if the
        sides fall back to BF16 later. None: each side has its own copy of the frozen weights."""
        return self.numerics_config().rollout_spec if self.sync.shared_base else None

    def to_dict(self) -> dict[str, Any]:
        """Return the experiment in plain YAML types, every default written out."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the experiment as YAML, below a comment with its loss, for `read_resolved`."""
        return f"# {self.formula}\n" + write_yaml(self.to_dict())


def with_keys(section: S, keys: Mapping[str, Any]) -> S:
    """Return an experiment, or a section, with other values for these keys, which are dotted names; none is checked."""
    for key, value in keys.items():
        name, _, rest = key.partition(".")
        value = with_keys(getattr(section, name), {rest: value}) if rest else value
        section = section.model_copy(update={name: value})
    return section
