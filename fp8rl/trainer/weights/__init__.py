"""Converts between a model's weights and the tensors of a Hugging Face checkpoint."""
