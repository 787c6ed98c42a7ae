"""What the GPUs can do: dense rates and one direction of a link, as published; the memory that torch finds."""

from __future__ import annotations

from dataclasses import dataclass

from numerics.errors import user_error

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        memory: bytes that a process can allocate, as torch's messages name them. bandwidth: of it, bytes/s.
        bf16, fp8: FLOP/s without sparsity.
        nvlink, network: bytes/s that one GPU sends within its node, and to others (400 Gbit/s InfiniBand).
        source: of the figures.
    """

    name: str
    memory: float
    bandwidth: float
    bf16: float
    fp8: float
    nvlink: float
    network: float
    source: str

    def peak(self, fp8: bool) -> float:
        """FLOP/s of products."""
        return self.fp8 if fp8 else self.bf16


_IB, _GIB = 50e9, 2**30

GPUS = {
    "h100": Gpu("H100 SXM", 79 * _GIB, 3.35e12, 989e12, 1979e12, 450e9, _IB, "NVIDIA H100 data sheet"),
    "h200": Gpu("H200 SXM", 139 * _GIB, 4.8e12, 989e12, 1979e12, 450e9, _IB, "NVIDIA H200 data sheet"),
    "h800": Gpu("H800 SXM", 79 * _GIB, 3.35e12, 989e12, 1979e12, 200e9, _IB, "H100 with NVLink of 400 GB/s both ways"),
    "h20": Gpu("H20", 95 * _GIB, 4.0e12, 148e12, 296e12, 450e9, _IB, "press reports of NVIDIA's data sheet (2023)"),
    "b200": Gpu("B200 SXM", 178 * _GIB, 7.7e12, 2250e12, 4500e12, 900e9, _IB, "NVIDIA HGX B200 data sheet"),
}


def gpu_named(name: str) -> Gpu:
    """Raises UserError for one that is not known."""
    if name.lower() not in GPUS:
        raise user_error(
            "--gpu", found=name, expected=f"one of {', '.join(GPUS)}", remedy="Choose the one whose memory is nearest."
        )
    return GPUS[name.lower()]
