"""The buckets of metrics by age and by position.

They stand apart because the registry of metrics names them: a process beside a run reads the registry without torch.
"""

OLDEST = 8
"""Age from which on tokens share one metric, so that an asynchronous run has a bounded number of names."""
POSITION_STARTS = (0, 16, 64, 256, 1024, 4096, 16384)
"""First position of each bucket of generated tokens; the last bucket is open. An answer's first token is at 0."""
