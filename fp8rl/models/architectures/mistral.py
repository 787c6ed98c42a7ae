"""Mistral, dense: Llama under another name. Models with a window of attention are refused."""

from __future__ import annotations

from dataclasses import replace

from fp8rl.models.architectures import llama
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.sizes import ModelSizes


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. Absent keys have the defaults of transformers' MistralConfig, in which attention has a window."""
    if (window := config.size("sliding_window", default=4096, if_null=0)) != 0:
        remedy = "Use a model that attends to all tokens, such as Mistral-7B-v0.3; the shared ops define no windows."
        raise config.refusal("sliding_window", window, "null", remedy)
    return llama.sizes(config, kv_heads=8)


ARCHITECTURE = replace(llama.ARCHITECTURE, name="MistralForCausalLM", model_type="mistral", sizes=sizes)
