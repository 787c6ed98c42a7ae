"""On what the ops run: definitions or kernels, compiled or not, and the start-up probe."""
