"""Moves quantized weights from the trainer to the engine and proves that they arrived."""
