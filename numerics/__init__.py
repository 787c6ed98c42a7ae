"""The ground floor: the quantization spec, quantizers, shared ops and tensor digests. Imports no other package of
ours."""
