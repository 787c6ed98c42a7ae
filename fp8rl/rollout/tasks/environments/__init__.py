"""Environments: the conversation between a prompt and the end of its answer."""
