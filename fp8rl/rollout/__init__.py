"""Samples answers: SGLang engines with our plugin, conversations, data and rewards."""
