"""Kernels of state-space models and linear attention: every name can be imported, and raises when called."""

from fp8rl_cpu_stubs import missing_names

__getattr__ = missing_names(__name__)
