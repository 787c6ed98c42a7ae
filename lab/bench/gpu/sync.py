"""The passes of a weight sync over the stack's weights, in parts of the copy bandwidth: quantize into buckets, digest
what is sent, copy into the engine's tensors, digest what is held."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fp8rl.models.architecture import Model
from fp8rl.models.architectures.qwen3_moe import ARCHITECTURE
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.digest import tensor_digests
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.buckets import Bucket, Packer
from fp8rl.weight_sync.manifest import Recorder
from fp8rl.weight_sync.served import served_tensors
from lab.bench.gpu.measure import Layers, Measured, Sizes, Stopwatch, random
from lab.bench.measure import Result

SPEC = QuantSpec.preset("fp8_block_pow2")
BUCKET_BYTES = 256 << 20


def run(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    bandwidth, model = watch.copy_bandwidth(), definition(sizes.stack)
    weights = dict(random_weights(model, watch.device))
    read = sum(tensor.nbytes for tensor in weights.values())
    served = {name: torch.empty_like(t) for name, t in served_tensors(weights.items(), SPEC, model)}
    sent = sum(tensor.nbytes for tensor in served.values())
    tensors = list(served.values())
    # The bytes that each pass must read and write.
    passes: dict[str, tuple[Callable[[], object], int]] = {
        "quantize into buckets": (lambda: _all(_pack(weights, model)), read + sent),
        "quantize and digest": (lambda: _all(_pack(weights, model, Recorder(model.tensors))), read + 2 * sent),
        "quantize, digest, copy": (
            lambda: _copy(_pack(weights, model, Recorder(model.tensors)), served),
            read + 4 * sent,
        ),
        "digest what is held": (lambda: tensor_digests(tensors), sent),
    }
    for name, (run_pass, size) in passes.items():
        seconds = watch.seconds(run_pass, repeats=5)
        done.row({"pass": name, "GB": size / 1e9}, {"seconds": seconds, "of copy": size / seconds / bandwidth})
    total = sum(float(row["seconds"]) for row in done.rows[2:])
    moved = read + 5 * sent
    recorder = Recorder(model.tensors)
    _copy(_pack(weights, model, recorder), served)
    held = dict(zip(served, tensor_digests(tensors), strict=True))
    different = sum(digest != held[name] for name, digest in recorder.sent().digests.items())
    done.equal("tensors that differ after the copy", different, tensors=len(held))
    parts = {"GB moved": moved / 1e9, "seconds": total, "BF16 weights (GB/s)": read / total / 1e9}
    name = "sync: quantize + digest + copy + digest / copy bandwidth"
    done.result(Result(name, moved / total / bandwidth, 0.6, True, parts))


def definition(layers: Layers) -> Model:
    """What the table of tensors says of such a stack."""
    sizes = ModelSizes(
        layers=layers.layers,
        hidden_size=layers.hidden,
        heads=layers.heads,
        kv_heads=layers.kv_heads,
        head_dim=128,
        rotary_dim=128,
        vocab_size=layers.vocab,
        norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=4096,
        tied=False,
        experts=layers.experts,
        top_k=layers.top_k,
        expert_size=layers.moe_intermediate,
    )
    return Model(ARCHITECTURE, sizes)


def random_weights(model: Model, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The stack's quantized matrices by their HF names, as a trainer exports them."""
    for row in model.tensors.rows.values():
        if model.quantizes(row, SPEC):
            yield row.name, random(*row.shape, device=device, scale=0.02)


def _pack(weights: dict[str, Tensor], model: Model, recorder: Recorder | None = None) -> Iterator[Bucket]:
    packer = Packer(BUCKET_BYTES, lambda size, device: torch.empty(size, dtype=torch.uint8, device=device))
    tensors = served_tensors(weights.items(), SPEC, model, packer.allocate)
    return packer.pack(recorder.watch(tensors) if recorder else tensors)


def _copy(buckets: Iterator[Bucket], served: dict[str, Tensor]) -> None:
    """What an engine does with a bucket: copy each tensor to where it is served from, many in one launch."""
    for bucket in buckets:
        parts = [bucket.flat[s.start : s.start + s.size].view(s.dtype).view(s.shape) for s in bucket.slots]
        for dtype in {part.dtype for part in parts}:
            pairs = [(served[s.name], p) for s, p in zip(bucket.slots, parts, strict=True) if p.dtype == dtype]
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_([t.view(torch.uint8) for t in targets], [p.view(torch.uint8) for p in sources])


def _all(buckets: Iterator[Bucket]) -> None:
    for _ in buckets:
        pass
