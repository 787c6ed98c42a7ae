"""Environment variables of every process that multiplies: ranks of a trainer, engines."""

from __future__ import annotations

BOUNDED_MEMORY = {
    # oneDNN keeps a kernel of about a megabyte for every shape of a product, 1,024 of them if it is not told otherwise;
    # experts get another number of tokens in each batch. Making one anew costs nothing that can be measured: in 60 steps
    # on 128 sequences a trainer held 1.3 GB in place of 2.1, and took as long (log, 2026-11-23).
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
