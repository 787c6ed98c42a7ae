"""Questions about a run before, during and after it: plan, doctor, attribution and rescoring."""
