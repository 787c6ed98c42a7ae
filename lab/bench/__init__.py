"""Benchmarks: each measures its sides in turn within one run, and what counts is their ratio."""
