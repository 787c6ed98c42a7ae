"""Environments: what happens between a prompt and the end of its answer."""
