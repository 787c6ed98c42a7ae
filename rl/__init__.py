"""In floors: mismatch, record, algorithms, experiment, guard, report, run, diagnose; then loop and cli."""
