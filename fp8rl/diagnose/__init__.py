"""Questions about a run before, during and after it: plan, doctor, preflight, audit, attribution, certification,
rescoring of capsules."""
