"""Rewards: functions that a spec names, ours in a file each, users' anywhere."""
