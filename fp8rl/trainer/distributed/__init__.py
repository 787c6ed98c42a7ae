"""Distributed training: process groups, the optimizer, and the traffic between ranks."""
