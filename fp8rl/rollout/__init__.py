"""The SGLang engine actor, its plugin, conversations, data and rewards."""
