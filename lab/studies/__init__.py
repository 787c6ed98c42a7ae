"""The laboratory: what the field claims about FP8, measured by commands that anyone can run again."""
