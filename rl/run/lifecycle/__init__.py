"""How a run starts, is interrupted, goes on and ends."""
