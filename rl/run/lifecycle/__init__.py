"""Lifecycle of a run: how it starts, is interrupted, goes on and ends."""
