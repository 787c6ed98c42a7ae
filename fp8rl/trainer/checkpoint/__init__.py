"""Writes and reads a trainer's checkpoints."""
