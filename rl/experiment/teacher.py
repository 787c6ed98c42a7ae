"""The `teacher:` section: a second model, which says how likely it finds what the policy samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import Field

from fp8rl.models.hub import HubPath, Revision, model_directory
from fp8rl.numerics.config import NumericsConfig, RolloutPrecision
from fp8rl.numerics.io.section import Section
from fp8rl.rl.experiment.sections import NumericsSection
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.server.client import SCORED_SHORT_OF


class TeacherSection(Section):
    """A model on engines of its own, for `algorithm.name=opd`. It computes as the policy's engines do: in
    `numerics.mode`, by the quantization spec. Its weights never change."""

    path: HubPath
    """Hugging Face directory in BF16, or the name of a model of the hub; with the tokenizer of `model.path`."""
    revision: Revision | None = None
    """Branch, tag or commit of a model of the hub, as `model.revision`."""
    engines: int = Field(default=1, ge=1, le=4096)
    """SGLang server processes."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks of one engine, as `rollout.tp`."""
    precision: RolloutPrecision | None = None
    """`fp8` or `bf16`. Null: that of `numerics.rollout`."""
    context_length: int | None = Field(default=None, ge=1)
    """Longest sequence of an engine, which scores what is at least 6 tokens shorter. Null: so much more than
    `rollout.context_length`."""
    max_total_tokens: int = Field(default=32768, ge=1)
    """Tokens that the KV cache of one engine holds."""

    @property
    def directory(self) -> Path:
        """Where the model is on this machine, as that of `model`."""
        return model_directory(self.path, self.revision, "teacher.path")

    @property
    def cache_tokens(self) -> int:
        """`max_total_tokens`, as the policy's engines call it."""
        return self.max_total_tokens

    def engine(self, rollout: RolloutSection) -> RolloutSection:
        """What its engines are started with, beside those of the policy."""
        return rollout.model_copy(
            update={
                "engines": self.engines,
                "tp": self.tp,
                "context_length": self.context_length or rollout.context_length + SCORED_SHORT_OF,
                "max_total_tokens": self.max_total_tokens,
                "port": None,
                "sleep": False,
                "speculation": None,
            }
        )

    def numerics(self, section: NumericsSection, tp: int) -> NumericsConfig:
        """What its engines compute. tp: of the run, whose order of reduction an engine of one rank follows."""
        numerics = section.config(self.tp if self.tp > 1 else tp)
        return replace(numerics, rollout=self.precision or numerics.rollout, router_replay="off")
