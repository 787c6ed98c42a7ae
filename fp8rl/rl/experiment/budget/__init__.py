"""Bytes that a run takes of a GPU: one sum, which `train`, `doctor` and `plan` go by."""
