"""Chooses how a process runs the shared ops: by definitions or kernels, compiled or not."""
