"""Files, read whole or refused, written whole or not at all."""
