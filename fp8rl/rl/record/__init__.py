"""The record of a run: its directory, metrics, events, samples, log and console."""
