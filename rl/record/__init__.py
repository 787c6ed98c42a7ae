"""What a run leaves behind: its directory, metrics, events, samples, log and console."""
