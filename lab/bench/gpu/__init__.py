"""The GPU bench, measured part by part: `python -m lab.bench.gpu` and `... evidence`."""
