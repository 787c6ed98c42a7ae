"""The GPUs that are known: what they can compute, and the memory that torch finds."""

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

    @property
    def fp8(self) -> bool:
        """Its products can be FP8's."""
        return self.capability >= (8, 9)


_GIB = 2**30
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
