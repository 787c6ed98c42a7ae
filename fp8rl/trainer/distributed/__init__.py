"""Distributed training: process groups, the optimizer, and what ranks send each other."""
