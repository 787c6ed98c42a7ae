"""Programs that speak OpenAI's API as environments: the run's engines sample their requests, and record the tokens."""
