"""Cut a CUDA library to the code of one architecture: of eight, a machine runs one."""

from __future__ import annotations

import struct

MAGIC = struct.pack("<I", 0xBA55ED50)
"""Of a fat binary, which nvcc lays into a library: a header of 16 bytes with its size, then entries."""
KINDS = {1, 2, 8, 16}
"""PTX, ELF and their compressed forms."""


def only(library: bytes, architectures: set[int]) -> bytes:
    """The library, its fat binaries with the entries of these architectures alone.

    What is kept moves to the front of its fat binary, and the rest becomes zeros, which pack to nothing; no other
    address changes. A fat binary that has none of them stays as it is.
    """
    cut, at = bytearray(library), 0
    while (at := library.find(MAGIC, at)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", library, at)
        start, end = at + header, at + header + size
        if header != 16 or end > len(library):
            at += 4
            continue
        body = b"".join(_entries(library, start, end, architectures))
        if body:
            cut[start:end] = body + bytes(size - len(body))
            struct.pack_into("<Q", cut, at + 8, len(body))
        at = end
    return bytes(cut)


def _entries(library: bytes, at: int, end: int, architectures: set[int]) -> list[bytes]:
    kept = []
    while at + 64 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        if kind not in KINDS or header < 64 or size > end - at:
            break
        if struct.unpack_from("<I", library, at + 28)[0] in architectures:
            kept.append(library[at : at + header + size])
        at += header + size
    return kept
