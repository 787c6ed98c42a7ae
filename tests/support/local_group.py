"""The models of one rank in this process, with the calls of a trainer group that a step learns by."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.step.batch import Objective, PassResult, Scored, TokenBatch
from tests.support.models import LENGTH
from tests.support.trainers import in_order


class LocalGroup:
    """calls: what was asked of which role, in order."""

    def __init__(self, path: Path, layout: Layout, **options: Any) -> None:
        from fp8rl.trainer.roles import Roles

        numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"), trainer="fp8")
        config = TrainerSection(lr=1e-3, warmup_steps=0, micro_batch_tokens=256)
        self.roles = Roles(TrainerSpec(path, config, numerics, 0, 100, LENGTH, **options), layout)
        self.calls: list[tuple[str, str]] = []

    @property
    def weight_version(self) -> int:
        return self.roles.policy.weight_version

    def forward_backward(self, batch: TokenBatch, objective: Objective, role: Any = "policy") -> PassResult:
        self.calls.append(("pass", role))
        done = self.roles.models[role].forward_backward(batch, objective)
        return replace(done.result, logprobs=in_order(done.rows, done.result.logprobs))

    def update(self, role: Any = "policy") -> float:
        self.calls.append(("update", role))
        return self.roles.models[role].update()

    def update_survival(self) -> float | None:
        return self.roles.policy.update_survival()

    def score(self, batch: TokenBatch, role: Any = "policy") -> Tensor:
        return self.score_routed(batch, role).logprobs

    def score_routed(self, batch: TokenBatch, role: Any = "policy") -> Scored:
        self.calls.append(("score", role))
        return Scored.assembled([self.roles.models[role].score_routed(batch)], batch, batch.rows)

    def parameters(self, role: Any = "policy") -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.roles.models[role].model.named_parameters()}
