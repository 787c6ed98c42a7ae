"""The training run. A package imports only those before it: mismatch, record, algorithms, experiment, guard, report,
run; then the loop."""
