"""A run while it lives: what it holds open, how it samples, recovers, keeps checkpoints and ends."""
