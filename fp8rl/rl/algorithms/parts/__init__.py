"""Components of algorithms."""
