"""Faults injected by real means into real runs; `python -m lab.bench.faults` runs every one and measures recovery."""
