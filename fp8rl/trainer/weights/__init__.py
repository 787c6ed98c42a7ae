"""The conversion of a model's weights from and to Hugging Face's tensors."""
