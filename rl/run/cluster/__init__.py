"""The Ray cluster of a run: its nodes, who sits where, jobs."""
