"""What only a GPU can show of this project, measured part by part: `python -m lab.bench.gpu` and `... evidence`."""
