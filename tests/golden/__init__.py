"""Golden runs: digests of what four short runs write, the oracle of changes that must not move a bit."""
