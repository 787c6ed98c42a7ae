"""Where a step's batch comes from."""
