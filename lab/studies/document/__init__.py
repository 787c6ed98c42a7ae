"""The page of all studies: which claims there are, what was found of each, and what that advises."""
