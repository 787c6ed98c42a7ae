"""The Ray cluster of a run: its nodes, the placement of ranks and engines, and reservations."""
