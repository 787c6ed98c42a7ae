"""Guards that watch a run and step in: gates and their actions, the record of them, and capsules to look at
afterwards."""
