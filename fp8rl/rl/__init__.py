"""The training run. Each package imports only packages before it in this list: mismatch, record, algorithms,
experiment, guard, report, run. The loop may import all of them."""
