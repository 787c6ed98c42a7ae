"""What algorithms are put together from."""
