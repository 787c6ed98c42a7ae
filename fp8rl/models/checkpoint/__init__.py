"""The files of a model: its safetensors, read and written, and adapters in the format of PEFT."""
