"""Programs that speak OpenAI's API as environments: what they ask for is sampled by the run's engines, and recorded."""
