"""The ground floor: the quantization spec, the quantizers, the shared ops and tensor digests. Imports torch only."""
