"""Guards that watch a run and step in: gates with their actions and their record, and capsules of a step."""
