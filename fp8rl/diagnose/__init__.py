"""Questions about a run before, during and after it: plan, doctor, preflight, audit, attribution and rescoring."""
