"""The roof: the `fp8rl` command."""
