"""Bytes on a GPU: by class, by phase of a step, on the fullest rank; colocated with an engine, or apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fp8rl.models.shape import BF16_BYTES, WeightGroup
from fp8rl.rl.experiment.budget.job import CONTEXT_BYTES, GPUS_PER_NODE, Job
from fp8rl.trainer.state_bytes import StateBytes, layers_of_stage, state_bytes
from fp8rl.weight_sync.served import served_bytes

Phase = Literal["rollout", "train", "update", "sync"]
PHASES: tuple[Phase, ...] = ("rollout", "train", "update", "sync")
RUNTIME_BYTES = 2 << 30
"""Bytes of a GPU process beside tensors: CUDA context, NCCL's buffers, workspaces. Assumed: nobody has measured it."""
CPU_PROCESS_BYTES = 715e6
"""Bytes of a trainer rank's actor on a CPU beside tensors: Python, torch, Megatron, compiled code, and 110 MB for
Ray and what a sync needs (measured)."""
CPU_KEPT = {
    ("exact", True): (0.0, 3.2, 3.9, 1.6),
    ("exact", False): (0.65, 1.95, 2.2, 0.0),
    ("native", True): (1.96, 4.75, 0.0, 0.0),
    ("native", False): (2.5, 1.86, 0.0, 0.0),
}
"""What is alive at the peak of a step on a CPU, by mode and FP8: bytes for each that the formula has of all layers'
attention, of all MLPs, of one layer's attention, and for each parameter. Fitted to 2 to 6 measured steps of each mode;
the ops in torch keep FP32 copies where kernels have registers."""
LOGIT_BYTES = 6.0
"""Bytes of one logit that are alive at a time."""
BUCKETS = 2
"""Buckets of a sync that are alive at a time: one is filled while the other travels."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU by class of tensor, as long as they are held."""

    rank: int | None
    """The trainer's, whose stage holds most; None for a GPU with an engine alone."""
    held: Mapping[str, Mapping[Phase, float]]
    """By class, in each phase. Classes of no bytes are left out."""

    def in_phase(self, phase: Phase) -> float:
        return sum(bytes_of.get(phase, 0.0) for bytes_of in self.held.values())

    @property
    def peak(self) -> float:
        """The bytes of the fullest phase."""
        return max(self.in_phase(phase) for phase in PHASES)

    @property
    def always(self) -> float:
        """Bytes that are held in every phase."""
        return sum(min(bytes_of.get(phase, 0.0) for phase in PHASES) for bytes_of in self.held.values())


def trainer_state(job: Job, rank: int) -> dict[str, StateBytes]:
    """Return what a rank holds from step to step on its GPU, by `dense` and `experts`."""
    return state_bytes(job.shape, job.layout, job.numerics, job.storage, rank, base=job.base)


def fullest_rank(job: Job) -> int:
    """The fullest rank of the first replica, where nothing is rounded down, in the stage with most bytes in
    training."""
    stages = [stage * job.layout.stage_size for stage in range(job.layout.pp)]
    return max(stages, key=lambda rank: Memory(rank, _trainer(job, rank)).peak)


def trainer_memory(job: Job, stage: int | None = None) -> Memory:
    """Memory of a GPU with a trainer rank alone: the fullest one of all, or of a pipeline stage."""
    rank = fullest_rank(job) if stage is None else stage * job.layout.stage_size
    return Memory(rank, _trainer(job, rank) | {"runtime": _through(RUNTIME_BYTES)})


def engine_memory(job: Job) -> Memory:
    """Memory of a GPU with a rank of an engine alone, which is sent to, and receives in buckets."""
    return Memory(None, _held(_engine(job) | {"engine runtime": _through(RUNTIME_BYTES)}))


def colocated_memory(job: Job) -> Memory:
    """Memory of a GPU with a trainer rank and a rank of an engine; both stay, unless the job has them sleep in
    turns."""
    rank, engine = fullest_rank(job), _engine(job)
    engine.pop("engine buckets")  # the same memory, mapped
    trainer = _trainer(job, rank)
    if job.sleep:
        for name in filter(_leaves, trainer):
            trainer[name] = _without(trainer[name], ("rollout", "sync"))
        engine = {name: _without(held, ("train", "update")) for name, held in engine.items()}
        for name in ("KV cache", "CUDA graphs"):  # they wake once the weights are there
            engine[name] = _without(engine[name], ("sync",))
    runtimes = {"runtime": RUNTIME_BYTES, "engine runtime": RUNTIME_BYTES}
    if job.maps:
        runtimes["other engines' contexts"] = CONTEXT_BYTES * (min(job.engines * job.engine_tp, GPUS_PER_NODE) - 1)
    return Memory(rank, _held(trainer | engine | {name: _through(held) for name, held in runtimes.items()}))


def moved_bytes(job: Job, rank: int) -> float:
    """Bytes of a rank that lie in the host's memory while engines sample: masters and moments."""
    held = _trainer(job, rank)
    return sum(held[name]["update"] for name in held if _leaves(name) and not name.endswith("gradients"))


def activation_bytes(job: Job, stage: int = 0, tokens: int | None = None) -> float:
    """Bytes of a pipeline stage's activations in training, without logits: those of all micro-batches that are under
    way.

    Stage s of p holds p - s of them (1F1B). tokens: of a micro-batch, if not the job's. Context-parallel ranks share
    them, and gather those of one layer.
    """
    tokens = tokens or job.micro_batch
    layers = [_of_layer(job, layer) for layer in layers_of_stage(job.shape.sizes.layers, job.layout.pp, stage)]
    under_way = min(job.micro_batches, job.layout.pp - stage)
    per_token = sum(stays for stays, _ in layers) + max(back for _, back in layers) / under_way
    return (per_token / job.layout.cp * under_way + _gathered(job)) * tokens / job.layout.tp


def _gathered(job: Job) -> float:
    """Bytes per token of what context-parallel ranks gather in the backward of a layer: keys, values, queries and the
    gradient of the result in BF16, two numbers of each query in FP32."""
    sizes = job.shape.sizes
    gathered = 4 * sizes.head_dim * (sizes.heads + sizes.kv_heads) + 8 * sizes.heads
    return float(gathered) if job.layout.cp > 1 else 0.0


def peak_on_a_cpu(job: Job) -> tuple[float, float]:
    """Bytes of a trainer rank's process at the peak of its first step on a CPU: of its tensors, and of all of it.

    Of a process whose C library hands large blocks back (`MALLOC_MMAP_THRESHOLD_=262144`); left alone it keeps more.
    """
    rank = fullest_rank(job)
    state = sum(each.total for each in trainer_state(job, rank).values())
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
    """6 bytes for each of the whole vocabulary's logits of a micro-batch, or of a chunk, beside which the gradient of
    the head's weight is added up in FP32; tensor parallelism shares the weight alone."""
    sizes, mine = job.shape.sizes, (tokens or job.micro_batch) / job.layout.cp
    chunk = job.layout.head_chunk_tokens
    total = 4.0 * sizes.vocab_size * sizes.hidden_size / job.layout.tp if mine > chunk else 0.0
    return LOGIT_BYTES * sizes.vocab_size * min(mine, chunk) + total


def _of_layer(job: Job, layer: int) -> tuple[float, float]:
    """Bytes per token of a layer's activations that stay until its backward, and that come back in it. The shared
    kernels keep inputs in BF16 and quantize them anew."""
    sizes, kept = job.shape.sizes, job.shape.activations(layer)
    attention, mlp = (job.shape.activations(layer, part).bf16 for part in ("attention", "mlp"))
    quantized = job.numerics.trainer_spec.of_layer(layer, sizes.layers).quantized
    whole = kept.bf16 + (kept.fp8 if quantized and job.storage == "transformer_engine" else 0.0)
    residual = 2.0 * sizes.hidden_size
    rotated = 2.0 * sizes.head_dim * (sizes.heads + sizes.kv_heads)
    return {
        "none": (whole, 0.0),
        "attention": (whole - rotated, rotated),
        "experts": (attention + residual, mlp),
        "layer": (residual, whole),
    }[job.layout.recompute]


def cache_bytes(job: Job) -> float:
    """Bytes that a token takes in the KV cache of one rank of an engine."""
    return float(job.shape.kv_bytes(BF16_BYTES, job.engine_tp))


def _trainer(job: Job, rank: int) -> dict[str, Mapping[Phase, float]]:
    states, stage = trainer_state(job, rank), rank // job.layout.stage_size
    found: dict[str, Mapping[Phase, float]] = {}
    for kind in ("parameters", "operands", "gradients", "masters", "moments", "padding"):
        for where, state in states.items():
            found[f"{where} {kind}"] = _through(getattr(state, kind))
    found["activations"] = {"train": activation_bytes(job, stage)}
    if stage == job.layout.pp - 1:
        found["logits"] = {"train": logit_bytes(job)}
    found["buckets"] = {"sync": float(BUCKETS * job.bucket_bytes)}
    if job.base:
        found["base"] = _through(served_bytes(job.shape, job.numerics.rollout_spec))
        found["placeholders"] = {"sync": float(_placeholders(job))}
        found["operands of a call"] = {"train": float(_operands_of_a_call(job))}
    if job.reference:
        found["reference"] = _through(sum(state.parameters + state.operands for state in states.values()))
    if job.teacher is not None:
        found["teacher's weights"] = _through(job.teacher.weights)
        found["teacher's cache"] = _through(job.teacher.cache)
        found["teacher's graphs"] = _through(job.teacher.graphs)
        found["teacher's workspace"] = {"rollout": job.teacher.working}
        found["teacher's runtime"] = _through(RUNTIME_BYTES)
    if job.critic:
        stays = sum(state.parameters + state.operands for state in states.values())
        found["critic"] = _through(stays)
        found["critic's optimizer"] = _through(sum(state.total for state in states.values()) - stays)
    return _held(found)


def _placeholders(job: Job) -> int:
    """Bytes of the first sync, and before: of the largest parameter on either side, which all others share until they
    are read from the base (`numerics.core.memory`)."""
    spec, weights = job.numerics.rollout_spec, job.shape.weights
    trainers = max(weight.size * weight.copies // _ranks(job, weight) * BF16_BYTES for weight in weights)
    engines = max(
        weight.size * weight.copies * (spec.weight.dtype.itemsize if quantized else BF16_BYTES)
        for weight in weights
        for quantized in {layer in job.shape.quantized_layers(weight, spec) for layer in weight.layers or (0,)}
    )
    return trainers + engines


def _operands_of_a_call(job: Job) -> int:
    """Bytes of what the backward of a frozen weight makes of its codes, and forgets (`numerics.frozen`), for the
    largest: their transpose, or where it computes in BF16 what they say, and the transpose of that."""
    spec = job.numerics.trainer_spec
    each = 1 if job.numerics.trainer == "fp8" else 2 * spec.weight.dequantized_dtype.itemsize
    quantized = (weight for weight in job.shape.weights if job.shape.quantized_layers(weight, spec))
    return max((weight.size * weight.copies // _ranks(job, weight) * each for weight in quantized), default=0)


def _ranks(job: Job, weight: WeightGroup) -> int:
    """Return the number of a trainer's ranks that share the weights of a layer."""
    return {"split": job.layout.tp, "experts": job.layout.ep, "replicated": 1}[weight.share]


def _leaves(name: str) -> bool:
    """Return whether a class of the trainer's makes room for engines. Weights stay, as do those of a reference."""
    return name.endswith((" gradients", " masters", " moments", " optimizer"))


def _engine(job: Job) -> dict[str, Mapping[Phase, float]]:
    adapters = job.shape.adapter_bytes if job.separate else 0
    own = 0 if job.base else served_bytes(job.shape, job.numerics.rollout_spec, job.engine_tp)
    return {
        "engine weights": _through(adapters + own),
        "KV cache": _through(job.kv_tokens * cache_bytes(job)),
        "CUDA graphs": _through(job.graph_bytes),
        "engine workspace": {"rollout": job.working_bytes},
        "engine buckets": {"sync": float(BUCKETS * job.bucket_bytes)},
    }


def _held(classes: Mapping[str, Mapping[Phase, float]]) -> dict[str, Mapping[Phase, float]]:
    return {name: held for name, held in classes.items() if any(held.values())}


def _without(held: Mapping[Phase, float], away: tuple[Phase, ...]) -> dict[Phase, float]:
    return {phase: each for phase, each in held.items() if phase not in away}


def _through(held: float) -> dict[Phase, float]:
    """Return the same bytes for every phase."""
    return {phase: float(held) for phase in PHASES}
