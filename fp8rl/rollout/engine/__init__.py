"""Runs SGLang: one server behind a Ray actor, its client, and the plugin in its processes."""
