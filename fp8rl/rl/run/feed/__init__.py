"""The source of each step's batch."""
