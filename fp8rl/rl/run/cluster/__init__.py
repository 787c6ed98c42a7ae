"""The Ray cluster of a run: its nodes, and the places that it reserves on them for ranks and engines."""
