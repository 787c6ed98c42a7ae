"""Reads and writes the files of a model: safetensors, and adapters in the format of PEFT."""
