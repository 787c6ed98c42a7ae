"""The lowest layer: the quantization spec, quantizers, shared ops and tensor digests. Imports no other package of ours.

Its folder `core` has no numerics: it has errors, files, sections of a spec, memory and processes for all packages."""
