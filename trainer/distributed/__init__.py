"""What ranks are to each other: process groups, the optimizer, what they send."""
