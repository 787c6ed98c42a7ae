"""What watches a run and steps in: gates and their actions, the record of them, and capsules to look at afterwards."""
