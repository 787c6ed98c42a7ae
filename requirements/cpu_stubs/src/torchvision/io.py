"""Stand-in for torchvision.io."""

from fp8rl_cpu_stubs import missing_names

__getattr__ = missing_names(__name__)
