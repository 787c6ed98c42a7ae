"""Everything that a run holds open: Ray, the trainer's ranks, the engines, the bridge between them, the tracker."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from types import TracebackType
from typing import Self

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from numerics.config import NumericsConfig
from rl.cluster import ray_cluster
from rl.console import StepConsole
from rl.engines import EnginePool
from rl.guard.capsule import cut_capsules
from rl.guard.events import cut_events
from rl.guard.standing import Standing
from rl.interrupts import Closing
from rl.run_dir import RunDir
from rl.run_log import run_log
from rl.sides import sampling_params, start_trainer
from rl.spec import ExperimentSpec
from rl.tracking import Tracker
from rollout.tasks import Problem, load_problems, prompt_ids
from rollout.types import Endpoint, Prompt, SamplingParams, Trajectory
from trainer.actor import TrainerGroup
from weight_sync.bridge import Bridge
from weight_sync.hf_checkpoint import convert_checkpoint


@dataclass
class Stack:
    """The open parts of one run. `pool` and `bridge` are None in a run without engines.

    Attributes:
        numerics: what both sides run now.
        standing: what gates have changed.
        manifest: digests of the weights that the engines hold, as the last sync verified them.
    """

    spec: ExperimentSpec
    run: RunDir
    tokenizer: PreTrainedTokenizerBase
    numerics: NumericsConfig
    standing: Standing
    trainer: TrainerGroup
    pool: EnginePool | None
    bridge: Bridge | None
    tracker: Tracker
    console: StepConsole
    first_step: int
    _closing: Closing
    manifest: Path | None = None

    @classmethod
    def open(cls, spec: ExperimentSpec, run: RunDir) -> Stack:
        """Start all parts; on any failure end those that were started. A run with checkpoints goes on from its last."""
        with Closing() as closing:
            closing.enter_context(run_log(run.log))
            resume_step = max(run.checkpoint_steps(), default=None)
            console = closing.enter_context(StepConsole(spec.run.steps, done=resume_step or 0))
            console.note(f"run {run.path}")
            console.note(f"spec {spec.numerics_config().spec.digest()}, seed {spec.run.seed}")
            closing.enter_context(ray_cluster(run.path / "ray_logs"))
            standing = Standing.of_checkpoint(run, resume_step)
            numerics = standing.numerics(spec.numerics_config())
            pool = _start_engines(spec, run, numerics, closing)  # they come up while the trainer does
            console.note(f"starting {'the engine and ' if pool else ''}the trainer")
            trainer = start_trainer(spec, numerics)
            closing.callback(trainer.shutdown)
            if resume_step is not None:
                cut_events(run.events, resume_step)
                cut_capsules(run, resume_step)
                trainer.load(run.checkpoint(resume_step))
            bridge = None
            if pool is not None:
                pool.wait()
                console.note("the engine is up; its report matches the spec")
                bridge = Bridge(trainer, numerics.rollout_spec, spec.sync, Path(spec.model.path), run.path / "served")
            tracker = Tracker(run, spec.to_dict(), spec.tracking.wandb, resume_step=resume_step)
            return cls(
                spec=spec,
                run=run,
                tokenizer=AutoTokenizer.from_pretrained(spec.model.path),
                numerics=numerics,
                standing=standing,
                trainer=trainer,
                pool=pool,
                bridge=bridge,
                tracker=closing.enter_context(tracker),
                console=console,
                first_step=(resume_step or 0) + 1,
                _closing=closing.pop_all(),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    def prompts(self, problems: list[Problem]) -> list[Prompt]:
        """Each problem with the tokens of its question, in the tokenizer's chat template."""
        return [Prompt(problem, prompt_ids(self.tokenizer, problem.question)) for problem in problems]

    def sampling(self, temperature: float) -> SamplingParams:
        """Sampling as the spec has it, at another temperature (0 is greedy)."""
        return sampling_params(self.spec, self.tokenizer, temperature)

    def text(self, trajectory: Trajectory) -> str:
        """The decoded answer, without its stop token."""
        ids = trajectory.token_ids[:-1] if trajectory.finished else trajectory.token_ids
        text: str = self.tokenizer.decode(ids)
        return text

    def answer_ids(self, problem: Problem) -> list[int]:
        """The tokens of a reference answer, with the EOS that ends it."""
        ids: list[int] = self.tokenizer(problem.answer, add_special_tokens=False).input_ids
        return [*ids, self.tokenizer.eos_token_id]

    def endpoints(self) -> list[Endpoint]:
        """Where the engines listen now."""
        return self.pool.endpoints() if self.pool is not None else []

    def fall_back_to_bf16(self) -> None:
        """Both sides compute in BF16 from now on: the trainer switches, and new engines take the place of the old.

        Their handshake says what they run. They start from the trainer's weights, and a sync has to verify that.
        """
        assert self.pool is not None and self.bridge is not None
        self.standing.bf16 = True
        self.numerics = self.standing.numerics(self.numerics)
        self.trainer.apply(methodcaller("set_numerics", self.numerics))
        self.bridge = replace(self.bridge, spec=self.numerics.rollout_spec)
        self.pool.stop()
        checkpoint, version = self.bridge.write_checkpoint(), self.trainer.weight_version
        self.pool = EnginePool.start(self.spec, self.run, self.numerics, checkpoint, version)
        self._closing.callback(self.pool.stop)
        self.pool.wait()

    def warn(self, text: str) -> None:
        """Say it on the console and raise an alert in wandb."""
        self.console.note(text, style="bold yellow")
        self.tracker.alert(text)


def load_data(spec: ExperimentSpec) -> tuple[list[Problem], list[Problem]]:
    """Training and evaluation problems, the latter as many as `eval.problems`."""
    train = load_problems(spec.data.train, "data.train")
    if spec.data.eval is None or spec.eval.problems == 0:
        return train, []
    return train, load_problems(spec.data.eval, "data.eval")[: spec.eval.problems]


def _start_engines(spec: ExperimentSpec, run: RunDir, numerics: NumericsConfig, closing: Closing) -> EnginePool | None:
    if spec.algorithm.name == "sft" and spec.eval.problems == 0:
        return None
    checkpoint = run.path / "served" / "start"
    closing.callback(shutil.rmtree, checkpoint.parent, ignore_errors=True)
    convert_checkpoint(Path(spec.model.path), checkpoint, numerics.rollout_spec)
    pool = EnginePool.start(spec, run, numerics, checkpoint)
    closing.callback(pool.stop)
    return pool
