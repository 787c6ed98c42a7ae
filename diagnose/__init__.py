"""Questions about a run before and after it: doctor, preflight, attribution, rescoring of capsules."""
