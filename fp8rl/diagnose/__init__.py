"""Questions about a run before and after it: doctor, preflight, audit and plan; explain."""
