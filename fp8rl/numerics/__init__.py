"""The ground floor: the quantization spec, quantizers, shared ops and tensor digests. Imports no other package of ours.

Its folder `core` has no numerics: errors, files, sections of a spec, memory and processes, for every package above."""
