"""A run in words and pictures: its summary, and the page that needs no network."""
