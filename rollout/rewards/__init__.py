"""Rewards: functions that an experiment names, ours in a file each, users' wherever they are."""
