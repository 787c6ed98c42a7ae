"""The parts of a run while it lives: cluster, engines, feed, step, syncs, record, checkpoints and end."""
