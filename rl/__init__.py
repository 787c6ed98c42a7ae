"""The run, in floors: mismatch, record, algorithms, experiment, guard, report, run; then the loop."""
