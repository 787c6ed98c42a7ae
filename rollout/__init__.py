"""The SGLang engine actor, its plugin, sampling, tasks and rewards. Imports numerics only."""
