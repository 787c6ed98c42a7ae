"""An architecture that exists for a test: Qwen3-MoE with gated heads, a norm behind the attention, and experts under
another name.

`definition` is what would be a file in `models/architectures/`, `megatron` its mapping, and `engine` what SGLang would
bring. No file of the product knows of it.
"""
