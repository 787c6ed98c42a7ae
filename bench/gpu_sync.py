"""The passes of a weight sync over the stack's weights, in parts of the copy bandwidth: quantize into buckets, digest
what is sent, copy into the engine's tensors, digest what is held."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.gpu_measure import Layers, Measured, Sizes, Stopwatch, random
from bench.measure import Result
from numerics.digest import tensor_digests
from numerics.spec import QuantSpec
from weight_sync.buckets import Bucket, Packer
from weight_sync.manifest import Recorder
from weight_sync.quantized import served_tensors

SPEC = QuantSpec.preset("fp8_block_pow2")
BUCKET_BYTES = 256 << 20


def run(sizes: Sizes, watch: Stopwatch) -> Measured:
    done, bandwidth, layers = Measured(), watch.copy_bandwidth(), sizes.stack
    weights = dict(_weights(layers, watch.device))
    read = sum(tensor.nbytes for tensor in weights.values())
    served = {name: torch.empty_like(t) for name, t in served_tensors(weights.items(), SPEC, layers.layers)}
    sent = sum(tensor.nbytes for tensor in served.values())
    tensors = list(served.values())
    # The bytes that each pass must read and write.
    passes: dict[str, tuple[Callable[[], object], int]] = {
        "quantize into buckets": (lambda: _all(_pack(weights, layers)), read + sent),
        "quantize and digest": (lambda: _all(_pack(weights, layers, Recorder("1", ""))), read + 2 * sent),
        "quantize, digest, copy": (lambda: _copy(_pack(weights, layers, Recorder("1", "")), served), read + 4 * sent),
        "digest what is held": (lambda: tensor_digests(tensors), sent),
    }
    for name, (run_pass, size) in passes.items():
        seconds = watch.seconds(run_pass, repeats=5)
        done.rows.append({"pass": name, "GB": size / 1e9, "seconds": seconds, "of copy": size / seconds / bandwidth})
    total = sum(float(row["seconds"]) for row in done.rows[2:])
    moved = read + 5 * sent
    recorder = Recorder("1", "")
    _copy(_pack(weights, layers, recorder), served)
    held = dict(zip(served, tensor_digests(tensors), strict=True))
    different = sum(digest.split("@")[0] != held[name] for name, digest in recorder.manifest().entries.items())
    done.results += [
        Result("d == 0: tensors that differ after the copy", float(different), 0.0, False, {"tensors": len(held)}),
        Result(
            "sync: quantize + digest + copy + digest / copy bandwidth",
            moved / total / bandwidth,
            0.6,
            True,
            {"GB moved": moved / 1e9, "seconds": total, "BF16 weights (GB/s)": read / total / 1e9},
        ),
    ]
    return done


def _weights(layers: Layers, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The stack's quantized matrices by their HF names, as a trainer exports them."""
    attention = {
        "q_proj": (layers.heads * 128, layers.hidden),
        "k_proj": (layers.kv_heads * 128, layers.hidden),
        "v_proj": (layers.kv_heads * 128, layers.hidden),
        "o_proj": (layers.hidden, layers.heads * 128),
    }
    expert = {
        "gate_proj": (layers.moe_intermediate, layers.hidden),
        "up_proj": (layers.moe_intermediate, layers.hidden),
        "down_proj": (layers.hidden, layers.moe_intermediate),
    }
    for layer in range(layers.layers):
        for name, shape in attention.items():
            yield f"model.layers.{layer}.self_attn.{name}.weight", random(*shape, device=device, scale=0.02)
        for index in range(layers.experts):
            for name, shape in expert.items():
                where = f"model.layers.{layer}.mlp.experts.{index}.{name}.weight"
                yield where, random(*shape, device=device, scale=0.02)


def _pack(weights: dict[str, Tensor], layers: Layers, recorder: Recorder | None = None) -> Iterator[Bucket]:
    packer = Packer(BUCKET_BYTES, lambda size, device: torch.empty(size, dtype=torch.uint8, device=device))
    tensors = served_tensors(weights.items(), SPEC, layers.layers, packer.allocate)
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
