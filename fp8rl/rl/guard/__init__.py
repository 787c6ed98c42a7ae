"""Guards a run: gates watch its metrics and act, and capsules keep the worst sequences of a step."""
