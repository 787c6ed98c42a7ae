"""The SGLang plugin: puts the run's ops into the engine, keeps its quantized weights, and reports what it did.

SGLang calls `register` in each of its processes (entry point group `sglang.srt.plugins`). `Engine` sets the
environment variable FP8RL_PLUGIN. Without it `register` does nothing, so another SGLang in the same environment stays
stock. If a plugin raises, SGLang only logs the error, and serves with its stock ops. So the engine's owner asks for the
plugin's report (`engine.protocol`) before it uses the engine.
"""

from __future__ import annotations

import json
import os

CONFIG_VARIABLE = "FP8RL_PLUGIN"


def register() -> None:
    """Read the configuration and install all hooks. SGLang calls this. If it raises, no hook is installed."""
    text = os.environ.get(CONFIG_VARIABLE)
    if text is None:
        return
    import torch

    from fp8rl.models import load_architecture
    from fp8rl.models.adapters import AdapterSection
    from fp8rl.numerics.config import NumericsConfig
    from fp8rl.rollout.engine.plugin import hooks, state

    config = json.loads(text)
    if (architecture := config.get("architecture")) is not None:
        load_architecture(architecture)
    numerics = NumericsConfig.from_dict(config["numerics"])
    adapter = config.get("adapter")
    state.configure(
        numerics,
        config.get("role", "policy"),
        adapter=AdapterSection.model_validate(adapter) if adapter is not None else None,
        waits=config.get("shared_base", False),
        base_name=config.get("base_name"),
        architecture=architecture,
    )
    hooks.install(hooks.hooks_for(numerics, torch.cuda.is_available()))
