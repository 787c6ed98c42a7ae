"""What SGLang imports as SGLANG_EXTERNAL_MODEL_PACKAGE, in the engine's process: it adds no model, and writes down what
layers of linear attention are given and give."""
