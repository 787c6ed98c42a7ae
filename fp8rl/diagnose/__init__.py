"""Questions about a run: doctor before it, explain after it, and plan without one."""
