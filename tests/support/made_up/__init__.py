"""An architecture that exists for a test: Qwen3-MoE with a norm behind the attention, and experts under another name.

`definition` is what would be a file in `models/`, `megatron` its mapping, and `engine` what SGLang would bring.
"""
