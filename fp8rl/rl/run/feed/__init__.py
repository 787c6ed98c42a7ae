"""The source of a step's batch."""
