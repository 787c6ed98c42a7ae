"""One pass over a batch, from rows to gradients."""
