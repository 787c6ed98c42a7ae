"""The GPUs that are known: dense rates and one direction of a link, as published; the memory that torch finds."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from fp8rl.numerics.backend.implementation import BLACKWELL, HOPPER
from fp8rl.numerics.core.errors import user_error

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """A GPU."""

    name: str
    capability: tuple[int, int]
    """Compute capability, which decides what a GPU can run (`rl.experiment.preconditions.rules`)."""
    memory: float
    """Bytes that a process can allocate, as torch's messages name them."""
    bandwidth: float
    """Bytes/s of the memory."""
    bf16: float
    """FLOP/s without sparsity."""
    fp8: float
    """The same; 0 where the GPU has none."""
    nvlink: float
    """Bytes/s that one GPU sends within its node, over NVLink or PCIe."""
    network: float
    """Bytes/s that one GPU sends to other nodes (400 Gbit/s InfiniBand)."""
    source: str
    """Where the figures were published."""

    def peak(self, fp8: bool) -> float:
        """FLOP/s of products."""
        return self.fp8 if fp8 else self.bf16


_IB, _GIB = 50e9, 2**30
_PCIE4, _PCIE5 = 32e9, 64e9

GPUS = {
    "h100": Gpu("H100 SXM", HOPPER, 79 * _GIB, 3.35e12, 989e12, 1979e12, 450e9, _IB, "NVIDIA H100 data sheet"),
    "h200": Gpu("H200 SXM", HOPPER, 139 * _GIB, 4.8e12, 989e12, 1979e12, 450e9, _IB, "NVIDIA H200 data sheet"),
    "h800": Gpu("H800 SXM", HOPPER, 79 * _GIB, 3.35e12, 989e12, 1979e12, 200e9, _IB, "H100 with half of its NVLink"),
    "h20": Gpu("H20", HOPPER, 95 * _GIB, 4.0e12, 148e12, 296e12, 450e9, _IB, "press reports of its data sheet (2023)"),
    "b200": Gpu("B200 SXM", BLACKWELL, 178 * _GIB, 7.7e12, 2250e12, 4500e12, 900e9, _IB, "NVIDIA HGX B200 data sheet"),
    "b300": Gpu("B300 SXM", (10, 3), 267 * _GIB, 7.7e12, 2250e12, 4500e12, 900e9, _IB, "NVIDIA HGX B300 data sheet"),
    "l40s": Gpu("L40S", (8, 9), 44 * _GIB, 0.864e12, 362e12, 733e12, _PCIE4, _IB, "NVIDIA L40S data sheet"),
    "4090": Gpu("RTX 4090", (8, 9), 23.5 * _GIB, 1.008e12, 165e12, 330e12, _PCIE4, _IB, "NVIDIA Ada whitepaper"),
    "rtx pro 6000": Gpu(
        "RTX PRO 6000", (12, 0), 94 * _GIB, 1.792e12, 503e12, 1007e12, _PCIE5, _IB, "NVIDIA RTX Blackwell whitepaper"
    ),
    "a100": Gpu("A100 SXM 80GB", (8, 0), 79 * _GIB, 2.039e12, 312e12, 0.0, 300e9, _IB, "NVIDIA A100 data sheet"),
}
_SAYS_NOTHING = re.compile(
    r"nvidia|geforce|rtx|blackwell|server|workstation|edition|sxm\d?|nvl|(80|141|96|48|24)gb|[^a-z0-9]"
)
"""What people write into a GPU's name beside that which tells it from the others here."""


def gpu_named(name: str) -> Gpu:
    """The GPU of a name as people write it, such as `RTX-PRO-6000`. Raises UserError for one that is not known."""
    known = {_SAYS_NOTHING.sub("", key): key for key in GPUS}
    plain = _SAYS_NOTHING.sub("", name.lower())
    if plain not in known:
        near = difflib.get_close_matches(plain, known, n=1)
        remedy = f"Did you mean {known[near[0]]}?" if near else "Choose the one whose memory is nearest."
        if not plain:  # the first word of a name of several, without quotes
            remedy = "Write the whole name, with - in place of blanks: --gpu rtx-pro-6000."
        raise user_error("--gpu", found=name, expected=f"one of {', '.join(GPUS)}", remedy=remedy)
    return GPUS[known[plain]]
