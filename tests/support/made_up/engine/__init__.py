"""What SGLang imports as SGLANG_EXTERNAL_MODEL_PACKAGE, in the engine's process."""
