"""The sections of an experiment spec that have no module of their own: run, cluster, model, numerics, data and more."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from fp8rl.models.architecture import check_scope
from fp8rl.models.hub import HubPath, Revision, data_directory, model_directory
from fp8rl.numerics.config import (
    KVPrecision,
    Mode,
    NumericsConfig,
    RolloutPrecision,
    RouterReplay,
    TrainerPrecision,
    kv_refusals,
)
from fp8rl.numerics.core.errors import UserError, raise_first
from fp8rl.numerics.core.section import Section, SpecPath
from fp8rl.numerics.spec import LAYER_EXCEPTIONS, ROLES, Format, Granularity, QuantSpec, Rounding, Scale
from fp8rl.rl.algorithms import READING
from fp8rl.rl.record.trackers import WandbSection
from fp8rl.rollout.tasks.data import Source
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.rollout.types import some_or_all


class RunSection(Section):
    """Name, folder and length of a run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Folder of the run inside `dir`."""
    dir: SpecPath = "runs"
    """Folder of the runs. Left out: `runs` in the current directory."""
    shared: bool = False
    """True: the umask decides who may read a new run's folder. False: only the folder's owner may (mode 0700)."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """The seed of every draw of the run: the order of the problems and each sampled token."""
    steps: int = Field(default=60, ge=1)
    """Number of steps. In each step a batch is sampled, judged, trained on and synced."""
    restarts: int = Field(default=2, ge=0)
    """How often the command starts a run again from its last checkpoint, after the loss of a trainer rank or of Ray."""


class ClusterSection(Section):
    """The nodes of a Ray cluster that a run uses. A side whose key is not set may use all nodes."""

    placement: Literal["pack", "spread"] = "pack"
    """`pack`: as few nodes as possible, engines near the trainer. `spread`: evenly over the nodes."""
    trainer_nodes: str | None = Field(default=None, min_length=1)
    """Nodes for the trainer's ranks: an address, a custom resource (`ray start --resources='{"NAME": 1}'`), or a label
    (`key=value`)."""
    engine_nodes: str | None = Field(default=None, min_length=1)
    """Nodes for the engines, named as in `trainer_nodes`."""


class ModelSection(Section):
    """The model that is trained."""

    path: HubPath
    """Hugging Face directory with config.json, safetensors weights and tokenizer, or the name of a model of the hub,
    such as `Qwen/Qwen3-0.6B`. Quantized dimensions must be multiples of 128."""
    revision: Revision | None = None
    """Branch, tag or commit of a model of the hub. Null: the default branch. A run's `spec.yaml` has the commit."""
    architecture: SpecPath | None = None
    """Python file with an architecture of your own ([models.md](models.md#how-to-add-the-next)). Null: a built-in
    one."""

    @property
    def directory(self) -> Path:
        """The model's directory here, fetched first if it is the hub's. Raises UserError: the hub does not give it."""
        return model_directory(self.path, self.revision, "model.path")

    def at(self, directory: Path) -> ModelSection:
        """Return a copy of the section with `directory` as its `path` and without a revision."""
        return self.model_copy(update={"path": str(directory), "revision": None})


class TensorOverride(Section):
    """Settings that replace the preset's for one kind of tensor: weights, activations or gradients."""

    format: Format | None = None
    """The format of the numbers. In every key of this section null means the preset's value."""
    granularity: Granularity | None = None
    """The numbers that share a scale: the whole tensor, a row, `group` numbers of a row, or a square block."""
    group: int | None = Field(default=None, ge=1)
    """How many numbers of a row share a scale. For blocks: the length of a block's side."""
    scale: Scale | None = None
    """Type of the scales: `fp32`, `pow2` (powers of two in FP32), or `e8m0` (powers of two in a byte)."""
    fixed: float | None = Field(default=None, gt=0.0)
    """A static range, -fixed to fixed, instead of a range from each block's largest value. Values beyond it
    saturate."""
    rounding: Rounding | None = None
    """`nearest`: to the nearest code. `stochastic`: up or down at random, so that the mean is the value itself."""


class NumericsSection(Section):
    """The quantization spec of both sides, and the precision that each side runs."""

    mode: Mode = "exact"
    """`exact`: both sides run the shared ops, so that their logprobs are equal. `native`: each side runs its library's
    own ops, and only the FP8 products are shared."""
    preset: Literal["bf16", "fp8_block_pow2", "fp8_block_fp32", "mxfp8", "ironwood"] = "fp8_block_pow2"
    """`fp8_block_pow2`: E4M3, power-of-two scales, weights in blocks of 128 × 128, activations and gradients in groups
    of 128. `fp8_block_fp32`: the same with FP32 scales. `ironwood`: a static range of ±224, gradients in E5M2 with a
    scale per row. `mxfp8`: groups of 32 with E8M0 scales; in native mode, only with a BF16 engine. `bf16`: nothing is
    quantized."""
    weight: TensorOverride = TensorOverride()
    """Changes of the preset for weights."""
    activation: TensorOverride = TensorOverride()
    """Changes of the preset for activations."""
    gradient: TensorOverride = TensorOverride()
    """Changes of the preset for gradients."""
    # Strictness would refuse the list that YAML gives.
    scope: Literal["all"] | Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Module kinds whose products are quantized: `all`, or a list of exact names (`q_proj`, ..., `experts.down_proj`).
    Null: the preset's. An FP8 engine quantizes all kinds, so a smaller scope needs `rollout: bf16`."""
    first_layers_bf16: int = Field(default=0, ge=0)
    """Number of decoder layers at the start whose products stay in BF16, on both sides."""
    last_layers_bf16: int = Field(default=0, ge=0)
    """Number of decoder layers at the end whose products stay in BF16, on both sides."""
    trainer: TrainerPrecision = "fp8"
    """The trainer's precision. `fp8`: quantized forward and backward. `fp8_forward`: quantized forward, BF16 gradients.
    `bf16`: nothing is quantized."""
    rollout: RolloutPrecision = "fp8"
    """The engines' precision. `fp8`: quantized by the spec. `bf16`: nothing is quantized."""
    kv: KVPrecision = "bf16"
    """The format of keys and values: `fp8` halves the engines' caches, and the trainer attends to the same rounded
    numbers. Each number is divided by a static scale and stored as an E4M3 code. Exact mode only."""
    key_scale: float = 1.0
    """The scale of keys with `kv: fp8`, a power of two. Numbers beyond 448 times the scale saturate. In MLA it is also
    the scale of values, because one row is both key and value."""
    value_scale: float = 1.0
    """The scale of values with `kv: fp8`, a power of two. MLA does not use it."""
    router_replay: RouterReplay = "off"
    """`record`: the engine reports each token's experts, and metrics compare them with the trainer's. `replay`: the
    trainer also takes the engine's experts (R3)."""
    deepgemm: bool | None = None
    """Whether FP8 products run on DeepGEMM (Hopper GPUs, exact mode). Null: yes, in each process that has DeepGEMM and
    finds at its start that it gives the Triton kernels' bits. True: a process without it does not start. False: no."""

    @field_validator("router_replay", mode="before")
    @classmethod
    def _yaml_reads_off_as_false(cls, value: Any) -> Any:
        return "off" if value is False else value

    @property
    def quantizes(self) -> bool:
        """True if any side computes in FP8."""
        return self.trainer != "bf16" or self.rollout != "bf16"

    def overrides(self) -> dict[str, Any]:
        """Return the settings that differ from the preset's, e.g. `{"weight": {"scale": "fp32"}}`."""
        roles = {role: getattr(self, role).model_dump(exclude_none=True) for role in ROLES}
        changes: dict[str, Any] = {role: fields for role, fields in roles.items() if fields}
        changes |= {key: getattr(self, key) for key in LAYER_EXCEPTIONS if getattr(self, key)}
        return changes if self.scope is None else changes | {"scope": self.scope}

    def config(self, tp: int) -> NumericsConfig:
        """Return the numerics that both sides start with. `tp` fixes the reduction order of row-parallel products."""
        spec, k_splits = QuantSpec.preset(self.preset).override(self.overrides()), tp if self.mode == "exact" else 1
        same = {each.name for each in fields(NumericsConfig)} & type(self).model_fields.keys()
        return NumericsConfig(spec=spec, k_splits=k_splits, **{name: getattr(self, name) for name in same})

    @model_validator(mode="after")
    def _spec_serves_both_sides(self, info: ValidationInfo) -> NumericsSection:
        raise_first(kv_refusals(self.mode, self.kv, self.key_scale, self.value_scale))
        try:
            spec = self.config(tp=1).spec
            if info.context != READING:  # a user's architecture, which a scope may speak of, is not imported then
                check_scope(spec)
            quantized = spec.quantized
        except UserError as error:
            raise ValueError(f"found {self.overrides()} over preset {self.preset}: {error}") from error
        if self.quantizes and not quantized:
            raise ValueError(
                f"found trainer={self.trainer} and rollout={self.rollout}, expected bf16 for both, as the spec (preset "
                f"{self.preset}) quantizes nothing. Set numerics.trainer=bf16 and numerics.rollout=bf16, or choose an "
                "FP8 preset"
            )
        return self


class DataKeys(Section):
    """Columns of the data; a dot leads into a nested one (`reward_model.ground_truth`)."""

    question: str | None = Field(default=None, min_length=1)
    """Column with text, or a list of chat messages (`role`, `content`). Null: `data.keys.question`, or `question`."""
    answer: str | None = Field(default=None, min_length=1)
    """Column with the reference answer: text, or a whole number. Null: `data.keys.answer`, or `answer`."""


class DataSource(Section):
    """A source of problems. A path alone, in place of the section, leaves every other key at its default."""

    shorthand: ClassVar[str] = "path"

    path: HubPath
    """A file of JSON lines, a `.parquet` file, a directory that `datasets` has saved, a directory of parquet, JSON or
    CSV files, or the name of a data set of the hub, such as `openai/gsm8k`."""
    revision: Revision | None = None
    """Branch, tag or commit of a data set of the hub, as `model.revision`."""
    name: str | None = Field(default=None, min_length=1)
    """The configuration to read, if a data set has several."""
    split: str | None = Field(default=None, min_length=1)
    """The split to read, if a data set has several."""
    keys: DataKeys = DataKeys()
    """Columns of this source that differ from `data.keys`."""
    system_prompt: str | None = None
    """The system prompt instead of `data.system_prompt`; empty: none."""
    chat_template: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, in addition to `data.chat_template` or instead of its values."""

    @property
    def configuration(self) -> str | None:
        """The configuration of the data set; a subclass may have another key for it."""
        return self.name


class TrainSource(DataSource):
    weight: float = Field(default=1.0, gt=0.0)
    """The share of the prompts that comes from this source, relative to the sum of all sources' weights."""


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


class DataSection(Section):
    """Problems with reference answers ([extending.md](extending.md#data))."""

    train: Annotated[
        tuple[TrainSource, ...],
        Field(min_length=1, strict=False),
        BeforeValidator(_listed, json_schema_input_type=TrainSource | list[TrainSource]),
    ]
    """The training problems: a path, a source, or a list of them."""
    eval: DataSource | None = None
    """Held-out problems. Not needed if `eval.problems` is 0, or if `eval.sets` has sets."""
    keys: DataKeys = DataKeys()
    """The columns to read from a source, unless the source has `keys` of its own."""
    system_prompt: str | None = None
    """The system prompt of each conversation that has none in the data."""
    chat_template: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the tokenizer's chat template, such as `{enable_thinking: false}`."""

    @property
    def training(self) -> list[Source]:
        """The sources of `train`. Settings that a source lacks are taken from this section."""
        return [self.source(source, self.train_key(place)) for place, source in enumerate(self.train)]

    def train_key(self, place: int) -> str:
        """Return the key by which messages name the source at `place` in `train`."""
        return "data.train" if len(self.train) == 1 else f"data.train.{place}"

    def source(self, own: DataSource, key: str) -> Source:
        """Return a source. Settings that it lacks are taken from this section. key: its name in messages."""
        system = self.system_prompt if own.system_prompt is None else own.system_prompt
        return Source(
            path=str(data_directory(own.path, own.revision, own.configuration, key)),
            key=key,
            name=own.configuration,
            split=own.split,
            question=own.keys.question or self.keys.question or "question",
            answer=own.keys.answer or self.keys.answer or "answer",
            system_prompt=system or "",
            chat_template={**self.chat_template, **own.chat_template},
        )


class CheckpointSection(Section):
    """Checkpoints, from which a run can be resumed."""

    every: int = Field(default=20, ge=1)
    """Steps between checkpoints; the last step always gets one."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints that stay on disk: the newest ones."""
    content: Literal["all", "weights"] = "all"
    """`weights`: without the optimizer, 2 bytes a parameter instead of 14. A run that resumes from such a checkpoint
    starts Adam again from the BF16 weights, so it differs from an uninterrupted run."""


class EvalSet(DataSource):
    """Held-out problems with a name, rewards and sampling of their own. Its metrics are `eval/NAME/...`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)
    """The name in the set's metrics, `eval/NAME/...`."""
    subset: str | None = Field(default=None, min_length=1)
    """The configuration, if a data set has several. (Other sources call this key `name`.)"""
    problems: int | None = Field(default=None, ge=1)
    """The first N problems are used. Null: `eval.problems`, or all."""
    rewards: RewardsSection | None = None
    """Rewards instead of the run's. Only the first one counts."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Answers to each problem."""
    temperature: float = Field(default=0.0, ge=0.0, le=10.0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the most probable tokens whose probabilities add up to this. 1 is off."""
    top_k: Annotated[int, AfterValidator(some_or_all)] = Field(default=-1, ge=-1)
    """Sample from this number of most probable tokens, and from tokens as probable as the last of them. -1 is off."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Sample from tokens with at least this share of the most probable token's probability. 0 is off."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest answer. Null: `rollout.max_new_tokens`."""
    pass_at: tuple[int, ...] = Field(default=(), strict=False)
    """The values of k for `pass@k`: the chance that one of k answers is right, estimated from `samples`."""

    @property
    def configuration(self) -> str | None:
        return self.subset

    @model_validator(mode="after")
    def _answers_differ_and_suffice(self) -> EvalSet:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"found samples={self.samples} with temperature=0, expected a temperature above 0, as greedy answers "
                "are all the same. Set temperature, or samples to 1"
            )
        for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if self.temperature == 0 and getattr(self, name) != off:
                raise ValueError(
                    f"found {name}={getattr(self, name)} with temperature=0, expected a temperature above 0, as greedy "
                    f"answers take the most probable token. Set temperature, or remove {name}"
                )
        if wrong := [k for k in self.pass_at if not 1 <= k <= self.samples]:
            raise ValueError(
                f"found {wrong[0]} in pass_at with samples={self.samples}, expected 1 to {self.samples}. Raise samples"
            )
        return self


class EvalSection(Section):
    """Evaluation on `data.eval`, whose problems are answered greedily (`eval/accuracy`), and on further named sets."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    problems: int = Field(default=200, ge=0)
    """The first N problems of `data.eval` are used. 0 turns all evaluation off."""
    sets: tuple[EvalSet, ...] = Field(default=(), strict=False)
    """Further sets, each with a name."""

    @model_validator(mode="after")
    def _names_differ(self) -> EvalSection:
        names = [eval_set.name for eval_set in self.sets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"found two sets called {', '.join(twice)}, expected different names. Rename one")
        return self


class TrackingSection(Section):
    """Records of a run, and the trackers that show them."""

    rollouts: Literal["all", "shown"] = "all"
    """Trajectories that rollouts/step_N.jsonl keeps. `all`: every trajectory, so that the step can be recomputed from
    the file (about 60 bytes a generated token). `shown`: only the trajectories of the report."""
    # Strictness would refuse the list that YAML gives.
    to: tuple[Literal["wandb", "tensorboard"], ...] = Field(default=("wandb",), strict=False)
    """Trackers that get the run's metrics. TensorBoard needs the extra `tensorboard`; its files are in `tensorboard/`
    of the run. Any other tracker can read the run's `metrics.jsonl`."""
    wandb: WandbSection = WandbSection()
    """The run in wandb."""

    @property
    def recorded(self) -> tuple[str, ...]:
        """The trackers that get the metrics, each once; wandb only if it is not disabled."""
        return tuple(name for name in dict.fromkeys(self.to) if name != "wandb" or self.wandb.mode != "disabled")
