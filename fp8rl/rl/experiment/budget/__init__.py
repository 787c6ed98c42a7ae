"""The GPU memory that a run takes: one calculation, which `train`, `doctor` and `plan` use."""
