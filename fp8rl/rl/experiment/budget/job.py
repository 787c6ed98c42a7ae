"""The job that a memory budget is for: a model, a layout, numerics and a batch. Also a table of GPUs."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from fp8rl.models.shape import Shape
from fp8rl.numerics.backend.implementation import BLACKWELL, HOPPER
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.rollout.config import RolloutSection
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.state_bytes import Storage
from fp8rl.weight_sync.served import served_bytes

_MIB, _GIB = 2**20, 2**30
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """A GPU of some machine, or a model of GPU."""

    name: str
    capability: tuple[int, int]
    """Compute capability, which decides what a GPU can run (`rl.experiment.preconditions.rules`)."""
    memory: float
    """Bytes that a process can allocate, as torch's messages name them; 0 if the GPU shares the machine's memory."""


GPUS = {
    "h100": Gpu("H100 SXM", HOPPER, 79 * _GIB),
    "h200": Gpu("H200 SXM", HOPPER, 139 * _GIB),
    "h800": Gpu("H800 SXM", HOPPER, 79 * _GIB),
    "h20": Gpu("H20", HOPPER, 95 * _GIB),
    "b200": Gpu("B200 SXM", BLACKWELL, 178 * _GIB),
    "b300": Gpu("B300 SXM", (10, 3), 267 * _GIB),
    "l40s": Gpu("L40S", (8, 9), 44 * _GIB),
    "4090": Gpu("RTX 4090", (8, 9), 23.5 * _GIB),
    "rtx pro 6000": Gpu("RTX PRO 6000", (12, 0), 94 * _GIB),
    "a100": Gpu("A100 SXM 80GB", (8, 0), 79 * _GIB),
}
_SAYS_NOTHING = re.compile(
    r"nvidia|geforce|rtx|blackwell|server|workstation|edition|sxm\d?( ac)?|pcie|nvl|(80|141|96|48|24)gb|hbm\d|[^a-z0-9]"
)
"""Parts of a GPU's name that are not needed to tell it from the other GPUs of the table."""


def gpu_named(name: str) -> Gpu:
    """Find a GPU by its name, however it is written: `RTX-PRO-6000`. Raises UserError: the table has no such GPU."""
    known = {_SAYS_NOTHING.sub("", key): key for key in GPUS}
    plain = _SAYS_NOTHING.sub("", name.lower())
    if plain not in known:
        near = difflib.get_close_matches(plain, known, n=1)
        remedy = f"Did you mean {known[near[0]]}?" if near else "Choose the GPU whose memory is nearest."
        if not plain:  # the first word of a name of several, without quotes
            remedy = "Write the whole name, with - in place of blanks: --gpu rtx-pro-6000."
        raise user_error("--gpu", found=name, expected=f"one of {', '.join(GPUS)}", remedy=remedy)
    return GPUS[known[plain]]


@dataclass(frozen=True)
class TeacherBytes:
    """Bytes of a teacher's engine on a GPU."""

    weights: float
    cache: float
    graphs: float
    working: float
    """Bytes that must be free for the engine in addition to its weights, cache and graphs."""


@dataclass(frozen=True)
class Job:
    """A training step of one trainer and its engines."""

    shape: Shape
    layout: TrainerSection
    numerics: NumericsConfig
    storage: Storage
    """The form in which the trainer keeps quantized weights."""
    rows: int
    """Answers of a step."""
    length: int
    """Tokens of each answer, prompt included."""
    engines: int = 1
    engine_tp: int = 1
    """Ranks of an engine."""
    kv_tokens: int = 32768
    """Tokens that the KV cache of an engine holds."""
    states: int = 0
    """Sequence states that an engine holds in addition to the KV cache, if the model has states."""
    bucket_bytes: int = 256 << 20
    maps: bool = False
    """Whether engines map the buckets of every rank, so that each engine has a CUDA context on each GPU."""
    graph_bytes: float = 0.0
    """Bytes of an engine's CUDA graphs."""
    working_bytes: float = 0.0
    """Bytes that must be free for an engine in addition to its weights, KV cache and CUDA graphs."""
    buffer_bytes: float = 0.0
    """Bytes of `working_bytes` that the engine keeps while it sleeps."""
    sleep: bool = False
    """Trainer and engine share a GPU and take turns: each makes room while the other works."""
    may_sleep: bool = False
    """True if the spec allows `rollout.sleep`."""
    reference: bool = False
    """The trainer also holds a reference model."""
    critic: bool = False
    """The trainer also holds a critic."""
    teacher: TeacherBytes | None = None
    """Bytes of a teacher's engine on a trainer rank's GPU; None without one."""
    base: bool = False
    """Trainer and engines share one copy of the frozen weights (`sync.shared_base`)."""
    separate: bool = False
    """Engines hold adapters separately from their weights."""
    group: int = 1
    """Rows that begin with the same prompt."""
    prompt: int = 0
    """Tokens of the shared prompt that is computed once per group; 0 without prefix sharing."""

    @property
    def fp8(self) -> bool:
        """True if the trainer multiplies in FP8."""
        return self.numerics.trainer_spec.quantized

    @property
    def tokens(self) -> int:
        """Tokens of a step's rows."""
        return self.rows * self.length

    @property
    def laid_tokens(self) -> int:
        """Tokens of a step that the trainer computes; a shared prompt counts once."""
        return self.tokens - (self.rows - -(-self.rows // self.group)) * self.prompt

    @property
    def micro_batch(self) -> int:
        """Tokens of one micro-batch: as many whole rows as `micro_batch_tokens` allows, at least one. Packed rows of
        different lengths fill it."""
        budget = max(self.layout.micro_batch_tokens, self.length)
        most = budget if self.layout.packs else budget // self.length * self.length
        if self.prompt:
            return min(most, max(self.length, -(-self.laid_tokens // self.layout.dp)))
        return min(most, -(-self.rows // self.layout.dp) * self.length)

    @property
    def rank_tokens(self) -> float:
        """Tokens of a micro-batch on one rank: context-parallel ranks share rows."""
        return self.micro_batch / self.layout.cp

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, in each data-parallel replica."""
        return -(-self.laid_tokens // (self.layout.dp * self.micro_batch))

    def in_bf16(self) -> Job:
        return replace(self, numerics=self.numerics.in_bf16())


def job_of(experiment: Experiment, shape: Shape, storage: Storage, gpu_memory: float, length: int | None = None) -> Job:
    """Make the job of a step on GPUs with `gpu_memory` bytes. length: tokens of each row; None:
    `rollout.context_length`. If the spec sets no size of the KV cache, `kv_tokens` is 0 until `fit.with_cache`."""
    rollout, algorithm = experiment.rollout, experiment.algorithm
    length = length or rollout.context_length
    group = rollout.group_size if algorithm.samples else 1
    graphs, working = engine_room(rollout, gpu_memory)
    return Job(
        shape=shape,
        layout=experiment.trainer,
        numerics=experiment.numerics_config(),
        storage=storage,
        rows=algorithm.problems_per_step(rollout) * group,
        length=length,
        engines=rollout.engines if experiment.needs_engines else 0,
        engine_tp=rollout.tp,
        kv_tokens=rollout.max_total_tokens or 0,
        states=rollout.states(cuda=True),
        bucket_bytes=experiment.sync.bucket_mib << 20,
        maps=experiment.sync.transport == "tensor",
        graph_bytes=graphs,
        working_bytes=working,
        buffer_bytes=graph_buffers(rollout, shape) if experiment.numerics.mode == "exact" else 0.0,
        sleep=rollout.sleep and experiment.needs_engines,
        may_sleep=not (rollout.staleness or experiment.sync.delta or experiment.sync.engines_own_gpus),
        reference=algorithm.needs.reference and not shape.adapters,  # without its adapters, the policy is the reference
        critic=algorithm.needs.critic,
        base=experiment.sync.shared_base,
        separate=experiment.adapter is not None and experiment.adapter.mode == "separate",
        group=group,
        # A row of the planned length has the longest answer; the rest of it is the prompt.
        prompt=max(0, length - rollout.max_new_tokens)
        if algorithm.samples and experiment.trainer.prefix_sharing
        else 0,
    )


def teacher_bytes(experiment: Experiment, shape: Shape, gpu_memory: float) -> TeacherBytes | None:
    """Return the bytes that a teacher's engine takes on a trainer rank's GPU. None: it shares no GPU, because it has
    several ranks or engines have GPUs of their own. shape: the teacher's. gpu_memory: bytes of the GPU."""
    teacher = experiment.teacher
    if teacher is None or teacher.tp > 1 or experiment.sync.engines_own_gpus:
        return None
    numerics = teacher.numerics(experiment)
    engine = teacher.engine(experiment.rollout)
    kept = shape.kv_bytes(numerics.kv_format.dtype.itemsize)
    cache = float(teacher.max_total_tokens * kept + engine.states(True) * shape.request_bytes())
    return TeacherBytes(served_bytes(shape, numerics.rollout_spec), cache, *engine_room(engine, gpu_memory))


# What an SGLang engine (0.5.19) takes of a GPU beside weights and keys and values. SGLang fills a part of the GPU, its
# `mem_fraction_static`, with weights and cache, and wants to find the rest of it free when it sizes the cache: for the
# activations of a prefill, and for CUDA graphs. Unless the fraction is given, it follows from the longest prefill chunk
# and the largest graph (`sglang/srt/arg_groups/memory_hook.py`, whose figures these are).

_SMALL, _LARGE = 60 * _GIB, 160 * _GIB
_LEAST_CHUNK, _CHUNK_MIB, _CONSTANT_MIB, _GRAPH_MIB, _FLOOR_MIB = 2048, 1.5, 512, 2.0, 10 * 1024


def engine_room(config: RolloutSection, gpu_memory: float) -> tuple[float, float]:
    """Return the bytes of an engine rank's CUDA graphs, and the bytes that must be free besides them."""
    graphs = _GRAPH_MIB * _MIB * max(config.graphs)
    chunk = max(_LEAST_CHUNK, config.chunked_prefill_size or (16384 if gpu_memory >= _LARGE else 8192))  # SGLang's
    wanted = (_CONSTANT_MIB + chunk * _CHUNK_MIB + config.tp / 8 * 1024) * _MIB + graphs
    if gpu_memory > _SMALL:
        wanted = max(wanted, _FLOOR_MIB * _MIB)
    if config.memory_fraction is not None:
        wanted = gpu_memory * (1 - config.memory_fraction)
    return graphs, max(0.0, wanted - graphs)


_SMS, _LEAN_ROWS = 132, 16  # of a Hopper GPU; of SGLang's `_LEAN_BLOCK_M`


def graph_buffers(config: RolloutSection, shape: Shape) -> float:
    """Return the bytes that SGLang allocates on one rank for its CUDA graphs, and keeps while the engine sleeps.

    For each answer of the largest graph: logits in FP32, the slots of its context, and the workspace of one split of
    keys (`TritonAttnBackend.init_cuda_graph_state`, `GraphSharedOutput`), which exact mode's attention does not use.
    """
    sizes, batch = shape.sizes, max(config.graphs)
    value = max(family.value(sizes) for family, _ in shape.layers_of())
    of_answer = 4 * sizes.heads // config.tp * (value + 1) + 8 * config.context_length + 4 * sizes.vocab_size
    return float(batch * of_answer + 4 * _SMS * _LEAN_ROWS * (value + 2))
