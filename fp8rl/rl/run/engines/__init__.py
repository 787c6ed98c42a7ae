"""The engines of a run, and the teacher's."""
