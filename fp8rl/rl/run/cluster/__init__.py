"""The Ray cluster of a run: its nodes, what is placed where, jobs."""
