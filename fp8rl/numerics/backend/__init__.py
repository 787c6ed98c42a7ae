"""The backend of the ops: definitions or kernels, compiled or not, and the start-up probe."""
