"""An architecture that exists for a test: Qwen3-MoE with gated heads whose keys are cached for each query, a norm
behind the attention, and experts under another name.

`definition` is a user's file, and `engine` what SGLang would bring. No file of the product knows of it.
"""
