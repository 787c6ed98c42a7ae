"""The experiment: spec, objectives, mismatch monitors, gates, loop, tracking and the command line."""
