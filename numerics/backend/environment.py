"""Environment variables of every process that multiplies: ranks of a trainer, engines."""

from __future__ import annotations

BOUNDED_MEMORY = {
    # oneDNN keeps a kernel of about a megabyte for every shape of a product, 1,024 of them if it is not told otherwise,
    # and experts get another number of tokens in each batch. Making one anew costs nothing that can be measured.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
