"""A model's weights on their way to and from Hugging Face's tensors."""
