"""Calculates the bytes on a GPU of a trainer rank, an engine, or both, by class of tensor and phase of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fp8rl.models.shape import BF16_BYTES, WeightGroup
from fp8rl.rl.experiment.budget.job import GPUS_PER_NODE, Job
from fp8rl.trainer.config import OptimizerSection
from fp8rl.trainer.state_bytes import StateBytes, layers_of_stage, state_bytes
from fp8rl.weight_sync.served import served_bytes

Phase = Literal["rollout", "train", "update", "sync"]
PHASES: tuple[Phase, ...] = ("rollout", "train", "update", "sync")
RUNTIME_BYTES = 2 << 30
"""Bytes that a process takes on a GPU besides tensors: CUDA context, NCCL's buffers, workspaces. Assumed."""
CONTEXT_BYTES = 450 << 20
"""Bytes of the CUDA context of a process on a GPU whose memory it maps without computing there. Assumed."""
CPU_PROCESS_BYTES = 715e6
"""Bytes of a trainer rank's actor on a CPU besides tensors: Python, torch, Megatron, compiled code, and 110 MB for Ray
and syncs (measured)."""
CPU_KEPT = {
    ("exact", True): (0.0, 3.2, 3.9, 1.6),
    ("exact", False): (0.65, 1.95, 2.2, 0.0),
    ("native", True): (1.96, 4.75, 0.0, 0.0),
    ("native", False): (2.5, 1.86, 0.0, 0.0),
}
"""Factors of `peak_on_a_cpu`, by mode and FP8. The first three multiply the calculated activation bytes of all
attentions, of all MLPs, and of the first layer's attention. The fourth is bytes per parameter. They are fitted to 2 to
6 measured steps of each mode; the ops in torch keep FP32 copies where kernels have registers."""
LOGIT_BYTES = 6.0
"""Bytes that are alive at a time for each logit."""
BUCKETS = 2
"""Number of a trainer rank's buckets at a time: one is filled while the other is sent. An engine receives into one."""


Kind = Literal[
    "state", "masters", "moments", "base", "activations", "logits", "weights", "cache", "states", "graphs", "workspace",
    "buckets", "contexts", "teacher", "teacher's cache", "rest",
]  # fmt: skip
"""The kinds of bytes that different keys of a spec make smaller (`fit.check_fits`). `state`: the parameters, operands
and gradients that a trainer's ranks share."""


@dataclass(frozen=True)
class MemoryClass:
    """One class of bytes on a GPU."""

    name: str
    bytes: Mapping[Phase, float]
    kind: Kind = "rest"
    leaves: bool = False
    """The trainer frees these bytes while engines work, if the two take turns."""
    on_host: bool = False
    """True if bytes that leave are kept in the host's memory meanwhile; otherwise they are discarded."""
    stays: bool = False
    """A sleeping engine keeps these bytes."""

    @classmethod
    def through(
        cls, name: str, size: float, kind: Kind = "rest", leaves: bool = False, on_host: bool = False
    ) -> MemoryClass:
        """Make a class of bytes that are held in every phase."""
        return cls(name, {phase: float(size) for phase in PHASES}, kind, leaves, on_host)

    def without(self, *away: Phase) -> MemoryClass:
        return replace(self, bytes={phase: size for phase, size in self.bytes.items() if phase not in away})


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU, by class of tensor and phase."""

    rank: int | None
    """The trainer rank on the GPU; None if only an engine is on it."""
    classes: tuple[MemoryClass, ...]

    @property
    def held(self) -> dict[str, Mapping[Phase, float]]:
        """Bytes in each phase, by class. Classes without bytes are left out."""
        return {part.name: part.bytes for part in self.classes if any(part.bytes.values())}

    def in_phase(self, phase: Phase) -> float:
        return sum(part.bytes.get(phase, 0.0) for part in self.classes)

    @property
    def peak(self) -> float:
        """The bytes of the fullest phase."""
        return max(self.in_phase(phase) for phase in PHASES)

    @property
    def always(self) -> float:
        """Bytes that are held in every phase."""
        return sum(min(part.bytes.get(phase, 0.0) for phase in PHASES) for part in self.classes)


def trainer_state(job: Job, rank: int) -> dict[str, StateBytes]:
    """Return the bytes that a rank holds on its GPU between steps, for `dense` and `experts`."""
    return state_bytes(job.shape, job.layout, job.numerics, job.storage, rank, base=job.base)


def master_bytes(job: Job, rank: int) -> int:
    """Return the bytes of a rank's FP32 masters, which are on the GPU, or in the host's memory with `offload`."""
    on_gpu = job.layout.model_copy(update={"optimizer": OptimizerSection()})
    states = state_bytes(job.shape, on_gpu, job.numerics, job.storage, rank)
    return sum(state.masters for state in states.values())


def fullest_rank(job: Job) -> int:
    """Return the fullest trainer rank: of the fullest stage, in the first replica, whose shares are rounded up."""
    stages = [stage * job.layout.stage_size for stage in range(job.layout.pp)]
    return max(stages, key=lambda rank: Memory(rank, _trainer(job, rank)).peak)


def trainer_memory(job: Job, stage: int | None = None) -> Memory:
    """Return the memory of the fullest GPU that has only a trainer rank. stage: its pipeline stage; None: any stage."""
    rank = fullest_rank(job) if stage is None else stage * job.layout.stage_size
    return Memory(rank, (*_trainer(job, rank), MemoryClass.through("runtime", RUNTIME_BYTES)))


def engine_memory(job: Job) -> Memory:
    """Memory of a GPU that has only a rank of an engine, with the bucket in which it receives weights."""
    bucket = MemoryClass("engine buckets", {"sync": float(job.bucket_bytes)}, "buckets")
    return Memory(None, (*_engine(job), bucket, MemoryClass.through("engine runtime", RUNTIME_BYTES)))


def colocated_memory(job: Job) -> Memory:
    """Memory of a GPU with ranks of trainer and engine, which share buckets. Both stay, unless they take turns."""
    rank = fullest_rank(job)
    trainer, engine = _trainer(job, rank), _engine(job)
    if job.sleep:
        trainer = tuple(part.without("rollout", "sync") if part.leaves else part for part in trainer)
        # Weights wake first. The rest wakes when they have arrived.
        engine = tuple(
            part if part.stays else part.without("train", "update", *(("sync",) if part.kind in _WAKE_LATER else ()))
            for part in engine
        )
    runtimes = [MemoryClass.through("runtime", RUNTIME_BYTES), MemoryClass.through("engine runtime", RUNTIME_BYTES)]
    if job.maps:
        others = min(job.engines * job.engine_tp, GPUS_PER_NODE) - 1
        runtimes.append(MemoryClass.through("other engines' contexts", CONTEXT_BYTES * others, "contexts"))
    return Memory(rank, (*trainer, *engine, *runtimes))


def moved_bytes(job: Job, rank: int) -> float:
    """Bytes that a rank moves to the host's memory while engines sample: masters, moments, a reference's weights."""
    return sum(part.bytes["update"] for part in _trainer(job, rank) if part.on_host)


def activation_bytes(job: Job, stage: int = 0, tokens: int | None = None) -> float:
    """Bytes of a pipeline stage's activations in training, without logits, for all micro-batches that are under way.

    Stage s of p has p - s micro-batches under way (1F1B). tokens: the tokens of a micro-batch; None: as in the job.
    Context-parallel ranks split the activations, and gather the activations of one layer.
    """
    tokens = tokens or job.micro_batch
    stage_layers = layers_of_stage(job.shape.sizes.layers, job.layout.pp, stage)
    layers = [_of_layer(job, layer) for layer in stage_layers]
    under_way = min(job.micro_batches, job.layout.pp - stage)
    per_token = sum(stays for stays, _ in layers) + max(back for _, back in layers) / under_way
    gathered = max(job.shape.activations(layer).gathered for layer in stage_layers) if job.layout.cp > 1 else 0.0
    return (per_token / job.layout.cp * under_way + gathered) * tokens / job.layout.tp


def peak_on_a_cpu(job: Job) -> tuple[float, float]:
    """Return the peak bytes of a trainer rank in its first step on a CPU: of its tensors, and of the whole process.

    This is for a C library that returns large blocks (`MALLOC_MMAP_THRESHOLD_=262144`). By default it keeps more.
    """
    rank = fullest_rank(job)
    state = sum(part.total for part in trainer_state(job, rank).values())
    stage = rank // job.layout.stage_size
    layers = layers_of_stage(job.shape.sizes.layers, job.layout.pp, stage)
    kept = [[job.shape.activations(layer, part).bf16 for part in ("attention", "mlp")] for layer in layers]
    attention, mlps, once, each = CPU_KEPT[job.numerics.mode, job.fp8]
    per_token = sum(attention * first + mlps * second for first, second in kept) + once * kept[0][0]
    under_way = min(job.micro_batches, job.layout.pp - stage)
    tensors = state + per_token * job.rank_tokens / job.layout.tp * under_way + each * job.shape.parameters
    if stage == job.layout.pp - 1:
        tensors += logit_bytes(job)
    return tensors, tensors + CPU_PROCESS_BYTES


def logit_bytes(job: Job, tokens: int | None = None) -> float:
    """Return the bytes of a micro-batch's logits, 6 for each over the whole vocabulary. With chunks, count the logits
    of one chunk and the head weight's FP32 gradient. Tensor-parallel ranks split only this gradient."""
    sizes, mine = job.shape.sizes, (tokens or job.micro_batch) / job.layout.cp
    chunk = job.layout.head_chunk_tokens
    total = 4.0 * sizes.vocab_size * sizes.hidden_size / job.layout.tp if mine > chunk else 0.0
    return LOGIT_BYTES * sizes.vocab_size * min(mine, chunk) + total


def _of_layer(job: Job, layer: int) -> tuple[float, float]:
    """Return a layer's activations in bytes per token: kept until its backward pass, and recomputed in it. The shared
    kernels keep inputs in BF16, and quantize them again."""
    sizes, kept = job.shape.sizes, job.shape.activations(layer)
    attention, mlp = (job.shape.activations(layer, part).bf16 for part in ("attention", "mlp"))
    quantized = job.numerics.trainer_spec.of_layer(layer, sizes.layers).quantized
    whole = kept.bf16 + (kept.fp8 if quantized and job.storage == "transformer_engine" else 0.0)
    residual = 2.0 * sizes.hidden_size
    return {
        "none": (whole, 0.0),
        "attention": (whole - kept.core, kept.core),
        "experts": (attention + residual, mlp),
        "layer": (residual, whole),
    }[job.layout.recompute]


def cache_bytes(job: Job) -> float:
    """Bytes that a token takes in the KV cache of one rank of an engine."""
    return float(job.shape.kv_bytes(job.numerics.kv_format.dtype.itemsize, job.engine_tp))


def _trainer(job: Job, rank: int) -> tuple[MemoryClass, ...]:
    states, stage = trainer_state(job, rank), rank // job.layout.stage_size
    stays = sum(state.parameters + state.operands for state in states.values())
    found = [
        MemoryClass.through(f"{where} {name}", getattr(state, name), kind, leaves, on_host)
        for name, kind, leaves, on_host in _STATE
        for where, state in states.items()
    ]
    found.append(MemoryClass("activations", {"train": activation_bytes(job, stage)}, "activations"))
    if stage == job.layout.pp - 1:
        found.append(MemoryClass("logits", {"train": logit_bytes(job)}, "logits"))
    found.append(MemoryClass("buckets", {"sync": float(BUCKETS * job.bucket_bytes)}, "buckets"))
    if job.base:
        found += [
            MemoryClass.through("base", served_bytes(job.shape, job.numerics.rollout_spec), "base"),
            MemoryClass("placeholders", {"sync": float(_placeholders(job))}),
            MemoryClass("operands of a call", {"train": float(_operands_of_a_call(job))}),
        ]
    if job.reference:
        operands = sum(state.operands for state in states.values())
        found.append(MemoryClass.through("reference", stays - operands, "state", leaves=True, on_host=True))
        found.append(MemoryClass.through("reference's operands", operands, "state", leaves=True))
    if (teacher := job.teacher) is not None:
        found += [
            MemoryClass.through("teacher's weights", teacher.weights, "teacher"),
            MemoryClass.through("teacher's cache", teacher.cache, "teacher's cache"),
            MemoryClass.through("teacher's graphs", teacher.graphs, "graphs"),
            MemoryClass("teacher's workspace", {"rollout": teacher.working}, "workspace"),
            MemoryClass.through("teacher's runtime", RUNTIME_BYTES),
        ]
    if job.critic:
        optimizer = sum(state.total for state in states.values()) - stays
        found.append(MemoryClass.through("critic", stays, "state"))
        found.append(MemoryClass.through("critic's optimizer", optimizer, "state", leaves=True, on_host=True))
    return tuple(found)


_STATE: tuple[tuple[str, Kind, bool, bool], ...] = (
    ("parameters", "state", False, False),
    ("operands", "state", False, False),
    ("gradients", "state", True, False),
    ("masters", "masters", True, True),
    ("moments", "moments", True, True),
    ("padding", "rest", False, False),
)
"""For each field of `StateBytes`: its kind, and whether a class of it has `leaves` and `on_host`."""


def _placeholders(job: Job) -> int:
    """Bytes of placeholders, which exist until the first sync is over. On each side all parameters share the memory of
    the largest one, until they are read from the shared base (`numerics.core.memory`)."""
    spec, weights = job.numerics.rollout_spec, job.shape.weights
    trainers = max(weight.size * weight.copies // _ranks(job, weight) * BF16_BYTES for weight in weights)
    engines = max(
        weight.size * weight.copies * (spec.weight.dtype.itemsize if quantized else BF16_BYTES)
        for weight in weights
        for quantized in {layer in job.shape.quantized_layers(weight, spec) for layer in weight.layers or (0,)}
    )
    return trainers + engines


def _operands_of_a_call(job: Job) -> int:
    """Bytes that the backward pass makes from the codes of the largest frozen weight, and then frees. These are the
    transpose or, in BF16, the dequantized weight and its transpose (`numerics.weight_cache`)."""
    spec = job.numerics.trainer_spec
    factor = 1 if job.numerics.trainer == "fp8" else 2 * spec.weight.dequantized_dtype.itemsize
    quantized = (weight for weight in job.shape.weights if job.shape.quantized_layers(weight, spec))
    return max((weight.size * weight.copies // _ranks(job, weight) * factor for weight in quantized), default=0)


def _ranks(job: Job, weight: WeightGroup) -> int:
    """Return how many ranks of a trainer share the weights of a group."""
    return {"split": job.layout.tp, "experts": job.layout.ep, "replicated": 1}[weight.share]


_WAKE_LATER: tuple[Kind, ...] = ("cache", "states", "graphs")
"""Kinds of bytes that a waking engine allocates only once it has its weights."""


def _engine(job: Job) -> tuple[MemoryClass, ...]:
    adapters = job.shape.adapter_bytes if job.separate else 0
    weights = 0 if job.base else served_bytes(job.shape, job.numerics.rollout_spec, job.engine_tp)
    return (
        MemoryClass.through("engine weights", adapters + weights, "weights"),
        MemoryClass.through("KV cache", job.kv_tokens * cache_bytes(job), "cache"),
        MemoryClass.through("states of sequences", job.states * job.shape.request_bytes(job.engine_tp), "states"),
        MemoryClass.through("CUDA graphs", job.graph_bytes, "graphs"),
        replace(MemoryClass.through("engine buffers", job.buffer_bytes, "graphs"), stays=True),
        MemoryClass("engine workspace", {"rollout": max(0.0, job.working_bytes - job.buffer_bytes)}, "workspace"),
    )
