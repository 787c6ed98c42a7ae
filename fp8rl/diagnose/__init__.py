"""Answers questions about a run: `doctor` before it, `explain` after it, and `plan` without any run."""
